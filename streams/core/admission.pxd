@cython.locals(size=Py_ssize_t)
cpdef Py_ssize_t headers_bytes(object headers) except -1

@cython.locals(record=IncomingRecord, size=Py_ssize_t, price=Py_ssize_t)
cpdef Py_ssize_t size_of_records(list records) except -1

@cython.locals(change=Change, size=Py_ssize_t)
cpdef Py_ssize_t size_of_changes(list changes, dict latest) except -1

@cython.locals(output=Output, size=Py_ssize_t, price=Py_ssize_t)
cpdef Py_ssize_t size_of_outputs(list outputs) except -1
