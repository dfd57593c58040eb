"""The commands of the command line, one file each; `nbflow.cli` lists them."""
