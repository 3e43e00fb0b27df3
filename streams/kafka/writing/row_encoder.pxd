@cython.locals(
    output=Output,
    topic=TopicRows,
    rows=Rows,
    row_list=list,
    small=list,
    places=dict,
    by_partition=dict,
    position=Py_ssize_t,
    count=Py_ssize_t,
    size=Py_ssize_t,
    room=Py_ssize_t,
    most=Py_ssize_t,
    partitions=Py_ssize_t,
    encoded=bytes,
    head=bytes,
    record=bytes,
    length=bytes,
)
cpdef Py_ssize_t add_outputs(
    dict topics, encoded_headers, outputs, Py_ssize_t start, now_ms, Py_ssize_t largest
) except? -1

@cython.locals(
    change=Change,
    row_list=list,
    small=list,
    position=Py_ssize_t,
    count=Py_ssize_t,
    size=Py_ssize_t,
    room=Py_ssize_t,
    head=bytes,
    record=bytes,
    length=bytes,
)
cpdef Py_ssize_t add_changes(Rows rows, changes, Py_ssize_t start, now_ms, Py_ssize_t limit) except? -1
