@cython.locals(
    at=Py_ssize_t,
    size=Py_ssize_t,
    following="long long",
    base="long long",
    length="long long",
    delta="long long",
    leader_epoch="long long",
    epoch="long long",
)
cpdef scan_batches(bytes data, long long position, unpack)

@cython.locals(
    at=Py_ssize_t,
    stop=Py_ssize_t,
    position="long long",
    following="long long",
    base="long long",
    length="long long",
    checksum="long long",
    attributes=cython.int,
    delta="long long",
    first_ms="long long",
    latest_ms="long long",
    append_ms="long long",
    count="long long",
    is_hidden=cython.bint,
    taken=Py_ssize_t,
    body=bytes,
    first=Py_ssize_t,
    last=Py_ssize_t,
)
cpdef decode_batches(
    bytes data,
    Py_ssize_t end,
    list place,
    Py_ssize_t most,
    topic,
    partition,
    unpack,
    checksum_of,
    decompressed,
    headers_of,
    set aborted,
    list to_come,
    list records,
    columns=*,
    long long limit=*,
)

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
