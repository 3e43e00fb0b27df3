@cython.locals(
    text=cython.p_uchar,
    stop=Py_ssize_t,
    ordinal=Py_ssize_t,
    delta_ms="long long",
    known_ms="long long",
    delta="long long",
    previous="long long",
    size="long long",
    known=bytes,
    found=bytes,
)
cpdef decode_records(
    bytes data,
    Py_ssize_t at,
    Py_ssize_t end,
    Py_ssize_t count,
    topic,
    partition,
    long long base_offset,
    long long first_ms,
    long long append_ms,
    long long position,
    headers_of,
    list records,
)

@cython.locals(number="unsigned long long", bits=cython.int, byte="unsigned long long")
cpdef (long long, Py_ssize_t) varint(unsigned char* text, Py_ssize_t at, Py_ssize_t stop) noexcept
