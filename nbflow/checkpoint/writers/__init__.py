"""Writers of checkpoint files: safetensors and GGUF."""
