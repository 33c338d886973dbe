"""The twins' operations as CUDA C++, compiled by NVRTC at first use; no compiler in the image.

Knows tensors and integers like the twins. Imported only where there is a GPU, or to compile for one.
"""
