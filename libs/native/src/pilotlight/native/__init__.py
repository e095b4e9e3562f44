"""C++ behind a C interface, called with ctypes: device memory at fixed addresses, copies to the
device, graphs and kernel images.

Compiled when the package is installed or else when it is first used, with g++ alone: NVIDIA's
driver is found at run time, and no header of CUDA is needed.
"""
