@cython.locals(
    length=Py_ssize_t,
    whole=Py_ssize_t,
    at=Py_ssize_t,
    m=cython.uint,
    mask=cython.uint,
    k=cython.uint,
    h=cython.uint,
)
cpdef unsigned int murmur2(data) except? 0

cpdef Py_ssize_t partition_of(key, Py_ssize_t num_partitions) except? -1
