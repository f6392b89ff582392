"""The sizes at which programs are cut, each with the fact that it stands for.

Read them as ``limits.NAME`` where they are used, so that tests can set them.
"""

# Fact: the matrices that run at once bound the memory that a step takes beside
# parameters and state. All in bytes.
#
# On one device without kernels, counted in the dtype of the iteration. Smaller chunks
# would save memory, but the compiled program would repeat the iteration more often.
BYTES_ON_DEVICE = 1.5e9
# On a mesh, whole matrices in the dtype of the iteration that one device takes at once.
# Less than on one device, because the next chunk travels while this one is iterated.
BYTES_ON_MESH = 420e6
# In the kernels, a stack's 16-bit panels and the four Gram matrices and products beside
# each of them.
BYTES_IN_KERNELS = 1.4e9

# Fact: XLA for GPUs fuses a pass over at most 96 operands. What does not fit is
# computed in a second pass, from results that are stored once more.
#
# Matrices in a kernel's stack: up to three operands each where tall ones are
# transposed.
MATRICES_IN_STACK = 32
# Leaves in an exchange that travel in float16: two operands each, beside a few others.
LEAVES_IN_EXCHANGE = 40
# Leaves whose row and column statistics run together: two operands each, and one for
# both.
LEAVES_IN_STATISTICS = 47
# Leaves whose norms and inner products one program adds up: three operands for each
# leaf and block.
LEAVES_ON_SPHERE = 24

# Fact: XLA for GPUs concatenates up to ten arrays at full bandwidth. From eleven on it
# writes one element per thread, at a third of the bandwidth, and takes long to compile.
#
# Arrays in a concatenation. Eight divides most models' numbers of layers.
ARRAYS_IN_CONCATENATION = 8
# Leaves that are written into a stack of panels by one program.
LEAVES_IN_PANEL_WRITE = 10

# Fact: starting a program takes a GPU microseconds.
#
# Entries of the leaves that one program writes into a stack: so many that starting the
# next one is nothing beside them. XLA compiles small programs faster.
ENTRIES_IN_PANEL_WRITE = 10 * 2**22
# Entries from which on a matrix's row and column sums have a kernel of their own. For
# smaller ones a second pass costs less than starting it.
ENTRIES_FOR_SUMS_KERNEL = 2**20

# Fact: JAX traces and lowers a call once for all calls with equal arguments.
#
# Leaves per call. Larger groups divide fewer models evenly, so fewer calls share a
# trace.
LEAVES_PER_CALL = 8
