@cython.locals(
    records=list,
    timestamp=tuple,
    place=Py_ssize_t,
    at=Py_ssize_t,
    position=Py_ssize_t,
)
cpdef Py_ssize_t accept(
    list messages, Py_ssize_t start, topic, dict positions, dict batches, set at_end
) except? -1
