"""The sizes at which programs are cut, each with the fact that it rests on.

Users of this module read them as ``limits.NAME``, so that tests can set them.
"""

# Fact: the matrices that run at once bound the memory that a step takes beside
# parameters and state. All in bytes.
#
# On one device without kernels: the matrices of a chunk in the dtype of the iteration.
# Smaller chunks would save memory, but the program would repeat the iteration more
# often and take longer to compile.
BYTES_ON_DEVICE = 1.5e9
# On a mesh: the whole matrices that one device iterates at once, in the same dtype.
# They are fewer than on one device, because the next chunk travels meanwhile.
BYTES_ON_MESH = 420e6
# In the kernels: the panels of a stack, in 16 bits, and the four Gram matrices and
# products that each matrix of it needs.
BYTES_IN_KERNELS = 1.4e9

# Fact: XLA for GPUs fuses a pass over at most 96 operands. What does not fit is
# computed in a second pass, from results that are stored once more.
#
# Matrices in a stack of the kernels. They are up to three operands each, where tall
# ones are transposed.
MATRICES_IN_STACK = 32
# Leaves in one exchange on a mesh, in float16. They are two operands each, and there
# are a few others.
LEAVES_IN_EXCHANGE = 40
# Leaves whose row and column statistics run together. They are two operands each, and
# there is one for all.
LEAVES_IN_STATISTICS = 47
# Leaves whose norms and inner products are added up by one program. They are three
# operands for each of their blocks.
LEAVES_ON_SPHERE = 24

# Fact: XLA for GPUs concatenates up to ten arrays at full bandwidth. From eleven on it
# writes one element per thread, at a third of the bandwidth, and takes long to compile.
#
# Arrays in a concatenation. Eight, because it divides most models' numbers of layers.
ARRAYS_IN_CONCATENATION = 8
# Leaves that are written into a stack of panels by one program.
LEAVES_IN_PANEL_WRITE = 10

# Fact: starting a program takes a GPU microseconds.
#
# Entries of the leaves that one program writes into a stack. Writing so many takes far
# longer than starting a program; larger programs would only take longer to compile.
ENTRIES_IN_PANEL_WRITE = 10 * 2**22
# A matrix with at least so many entries has its row and column sums from a kernel.
# For smaller ones a second pass over the matrix costs less than starting the kernel.
ENTRIES_FOR_SUMS_KERNEL = 2**20

# Fact: JAX traces and lowers a call once for all calls with equal arguments.
#
# Leaves per call. Larger numbers divide fewer models evenly, so that fewer calls share
# a trace.
LEAVES_PER_CALL = 8
