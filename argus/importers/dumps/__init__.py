"""What NCCL and PyTorch wrote about collectives that did not end."""
