@cython.locals(
    text=cython.p_uchar,
    stop=Py_ssize_t,
    ordinal=Py_ssize_t,
    delta_ms="long long",
    delta="long long",
    previous="long long",
    size="long long",
    key_at=Py_ssize_t,
    value_at=Py_ssize_t,
    first=Py_ssize_t,
    kind=cython.int,
    place=cython.int,
    headers=bytes,
    found=bytes,
)
cpdef Py_ssize_t decode_columns(
    bytes data,
    Py_ssize_t at,
    Py_ssize_t end,
    Py_ssize_t count,
    long long base_offset,
    long long first_ms,
    long long append_ms,
    long long position,
    long long limit,
    Py_ssize_t shift,
    Py_ssize_t row,
    int[::1] edges,
    long long[::1] offsets,
    long long[::1] times,
    int[::1] lists,
    unsigned char[::1] kinds,
    dict known,
) except -1

@cython.locals(number="unsigned long long", bits=cython.int, byte="unsigned long long")
cpdef (long long, Py_ssize_t) varint(unsigned char* text, Py_ssize_t at, Py_ssize_t stop) noexcept
