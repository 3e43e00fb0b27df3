@cython.locals(
    record=IncomingRecord,
    last=IncomingRecord,
    heads=list,
    at=list,
    records=list,
    runs=list,
    batch=list,
    number=Py_ssize_t,
    start=Py_ssize_t,
    count=Py_ssize_t,
    taken=Py_ssize_t,
    oldest=Py_ssize_t,
    size=Py_ssize_t,
    first=Py_ssize_t,
    position=Py_ssize_t,
    stop=Py_ssize_t,
    until_ms="long long",
    limit="long long",
)
cpdef tuple merge(list input_numbers, list batches, list starts, Py_ssize_t most)

@cython.locals(
    last=IncomingRecord,
    done=list,
    start=Py_ssize_t,
    input_number=Py_ssize_t,
    end=Py_ssize_t,
)
cpdef list advance(list records, list runs, Py_ssize_t stop, list offsets)

@cython.locals(
    start=Py_ssize_t,
    input_number=Py_ssize_t,
    end=Py_ssize_t,
    last=Py_ssize_t,
)
cpdef Py_ssize_t count(list runs, Py_ssize_t stop, list counts) except -1

@cython.locals(output=Output, change=Change)
cpdef object name_input(
    Py_ssize_t input_number,
    list outputs,
    Py_ssize_t sent,
    Py_ssize_t stop_sent,
    list changes,
    Py_ssize_t written,
    Py_ssize_t stop_written,
)
