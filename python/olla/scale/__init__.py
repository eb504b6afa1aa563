"""Many graphs and goals: planned in processes, results kept in a folder. Importing it does not import torch."""

from olla.scale.folder import Folder, graphs_of
from olla.scale.result import Result, text
from olla.scale.scale import plan_files
from olla.scale.task import plan_file

__all__ = ["Folder", "Result", "graphs_of", "plan_file", "plan_files", "text"]
