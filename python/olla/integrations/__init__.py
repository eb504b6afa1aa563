"""olla inside other people's trainers and exporters: one module each, which imports theirs only when it is used."""
