"""C++ kernels for x86-64: built at first use, for the instruction set of this machine, and called through a C ABI."""
