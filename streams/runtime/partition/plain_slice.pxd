@cython.locals(
    record=IncomingRecord,
    change=Change,
    routes=dict,
    outputs=list,
    journal=list,
    position=Py_ssize_t,
    sent=Py_ssize_t,
    written=Py_ssize_t,
    own=Py_ssize_t,
    number=Py_ssize_t,
    place=Py_ssize_t,
    next_run=Py_ssize_t,
    first_sent=Py_ssize_t,
    first_written=Py_ssize_t,
)
cpdef tuple run(partition, host, list records, Py_ssize_t start, Py_ssize_t stop, inputs=*, runs=*)
