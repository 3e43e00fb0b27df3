"""``Table.get`` and ``Table.put``. A leaf (``sak/leaves.py``)."""

from __future__ import annotations

from typing import Any, Final

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import StoreError
from streams.records import Change
from streams.sak import leaves
from streams.stores.table_fields import JournalledFields, TableFields

CLASSES: Final = (Change, TableFields)
"""Whose fields are read by their places in memory when this is compiled."""


def get(self: TableFields, key: Any, default: Any = None) -> Any:
    """The value of ``key``, decoded anew at each call, or ``default``."""
    if key is None:
        self._refuse_null_key()
    encode_key = self._bare_encode_key  # a local name, as below: cheaper to call on Python 3.11
    try:
        key_bytes = encode_key(key)
    except Exception:
        key_bytes = self._encode_key(key)  # which takes it after all, or says what is wrong with it
    data = self._data
    if data is not None:
        value = data.get(key_bytes)
    else:
        get = self._get
        value = get(key_bytes)
    if value is None:
        return default
    decode_value = self._bare_decode_value
    try:
        return decode_value(value)
    except Exception:  # a frame, or a value that cannot be read
        return self._decoded_value(value, key, default)


def put(self: JournalledFields, key: Any, value: Any) -> None:
    """Set the value of ``key``: its bytes at this moment are what is kept and what goes into the changelog."""
    journal = self._journal
    if journal is None:
        self._refuse_write()
    if key is None:
        self._refuse_null_key()
    if value is None:
        raise StoreError(f"None was put into the table of {self.partition}; delete(key) removes a key")
    encode_key = self._bare_encode_key  # a local name, as below: cheaper to call on Python 3.11
    try:
        key_bytes = encode_key(key)
    except Exception:
        key_bytes = self._encode_key(key)
    if type(value) is self._value_class:
        encode_value, fields = self._bare_encode_value, self._kinds
        try:
            value_bytes = encode_value(value)
            # As in ``ctx.forward`` and ``events._by_shortcut``: written out, since this runs once a value.
            for name, kind, others in fields:
                part = getattr(value, name)
                found = type(part)
                if found is not kind:
                    if found in others:
                        continue
                elif kind is not float or part - part == 0.0:  # finite
                    continue
                value_bytes = self._encode_value(value)  # which reads it back
                break
        except Exception:
            value_bytes = self._encode_value(value)
    else:
        value_bytes = self._encode_value(value)
    if key_bytes >= RESERVED_KEY_PREFIX:
        self._refuse_reserved(key_bytes)
    # The journal first: an engine on disk takes its last change, and without it a failed event could not be undone.
    data = self._data
    if data is not None:
        journal.append(Change(key_bytes, value_bytes, data.get(key_bytes)))
        data[key_bytes] = value_bytes
    else:
        peek, put = self._peek, self._put
        journal.append(Change(key_bytes, value_bytes, peek(key_bytes)))
        put(key_bytes, value_bytes)


leaves.use(globals())
