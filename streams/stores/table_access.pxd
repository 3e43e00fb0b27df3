@cython.locals(data=dict)
cpdef get(TableFields self, key, default=*)

@cython.locals(data=dict, journal=list, fields=tuple)
cpdef put(TableFields self, key, value)
