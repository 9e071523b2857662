"""The devices that steps run on: real GPUs, other accelerators, and the virtual GPU."""
