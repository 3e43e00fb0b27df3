@cython.locals(data=dict)
cpdef get(TableFields self, key, default=*)

@cython.locals(data=dict, journal=list)
cpdef put(TableFields self, key, value)
