"""olla inside other projects: a module each, which imports that project."""
