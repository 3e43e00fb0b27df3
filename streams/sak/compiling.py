"""Build the leaves (``sak/leaves.py``): ``python -m streams.sak.compiling``, in a process of its own.

Needs Cython, setuptools and a C compiler; says in one line what is missing, and that is no failure. A leaf is compiled
from its ``.py`` as it is. What is added to its ``.pxd`` is written here, from the classes as this interpreter has them:

* A C struct for each of ``CLASSES``. Slots lie one behind the other, sorted by name, those of base classes first; the
  compiled module compares that with the classes when it is imported.
* Fields that the leaf only reads are properties: one that is not set is the ``AttributeError`` that it would be in
  Python. Cython knows no properties that can be set, so fields that the leaf sets are read without a look. Each
  property looks at them, too: a leaf begins with an object by a field that it only reads.
* A ``msgspec.Struct`` that is made with positional arguments is allocated and filled in, which takes less than the
  class's own call. Its defaults stand in the call then.
* ``value.partition(NULL)[1]``, the cheapest search for a ``null`` in Python, is one by ``memchr``;
  ``join((...))`` of seven parts of a record, where ``join`` is that of ``b""``, allocates once and copies;
  ``int.from_bytes(data[at:end], "little")`` (of four bytes at most) reads the bytes where they are.
* ``for name, kind, others in fields`` over the kinds of a value (``model/round_trips.py``) begins only if one of the
  value's fields is not of its kinds.

The file is put beside its source in one step, so that builds at the same time do not disturb each other or a process
that has it in use.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import sys
import sysconfig
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MemberDescriptorType, ModuleType
from typing import Final, TypeGuard

import msgspec

from streams.sak.leaves import COMPILED, PLAIN_VARIABLE, SUFFIX, built_file, source_of, states

DIRECTIVES: Final = {
    "language_level": 3,
    "annotation_typing": False,  # annotations are for type checkers: the types of C stand in the .pxd
    "nonecheck": True,  # else a field of None is read from wherever
    "embedsignature": False,
}
HEADER: Final = """\
#include <Python.h>
#include <math.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

/* Raises the AttributeError of the field that is not set. */
static PyObject *kes_unset(PyObject *of, const char *const *fields) {
    for (; *fields; fields++) {
        PyObject *found = PyObject_GetAttrString(of, *fields);
        if (!found) return NULL;
        Py_DECREF(found);
    }
    PyErr_Format(PyExc_AttributeError, "a field of %s is not set", Py_TYPE(of)->tp_name);
    return NULL;
}

/* Whether it contains "null". Raises what its method ``partition`` raises if it is no bytes. */
static int kes_has_null(PyObject *in) {
    if (!PyBytes_CheckExact(in)) {
        PyObject *parts = PyObject_CallMethod(in, "partition", "y", "null");
        PyObject *found = parts ? PySequence_GetItem(parts, 1) : NULL;
        int is_there = found ? PyObject_IsTrue(found) : -1;
        Py_XDECREF(parts);
        Py_XDECREF(found);
        return is_there;
    }
    const char *at = PyBytes_AS_STRING(in), *end = at + PyBytes_GET_SIZE(in);
    while (end - at >= 4 && (at = memchr(at, 'n', end - at - 3))) {
        if (!memcmp(at, "null", 4)) return 1;
        at++;
    }
    return 0;
}

/* The bytes of all parts, one behind the other. Raises TypeError for a part that is no bytes. */
static PyObject *kes_join(int count, PyObject *const *parts) {
    Py_ssize_t size = 0;
    for (int i = 0; i < count; i++) {
        if (!PyBytes_Check(parts[i])) {
            PyErr_Format(PyExc_TypeError, "a part is no bytes but %s", Py_TYPE(parts[i])->tp_name);
            return NULL;
        }
        size += PyBytes_GET_SIZE(parts[i]);
    }
    PyObject *joined = PyBytes_FromStringAndSize(NULL, size);
    char *to = joined ? PyBytes_AS_STRING(joined) : NULL;
    for (int i = 0; joined && i < count; to += PyBytes_GET_SIZE(parts[i++]))
        memcpy(to, PyBytes_AS_STRING(parts[i]), PyBytes_GET_SIZE(parts[i]));
    return joined;
}
#define kes_join7(a, b, c, d, e, f, g) kes_join(7, (PyObject *const[]){a, b, c, d, e, f, g})

/* The number in these bytes, four at most. Raises TypeError if they are none, OverflowError if they are more. */
static unsigned int kes_little(PyObject *of, Py_ssize_t at, Py_ssize_t end) {
    unsigned int number = 0;
    if (!PyBytes_Check(of)) {
        PyErr_Format(PyExc_TypeError, "expected bytes, not %s", Py_TYPE(of)->tp_name);
        return 0;
    }
    if (end > PyBytes_GET_SIZE(of)) end = PyBytes_GET_SIZE(of);
    if (at < 0 || end < 0 || end - at > 4) {
        PyErr_SetString(PyExc_OverflowError, "compiled code reads numbers of four bytes at most, from a place on");
        return 0;
    }
    for (int bits = 0; at < end; at++, bits += 8)
        number |= (unsigned int)(unsigned char)PyBytes_AS_STRING(of)[at] << bits;
    return number;
}

/* The kinds (name, class, further classes) if a field is of none of its classes, or a float that is not finite; else an
   empty tuple. Raises what reading the field raises. */
static PyObject *kes_misfits(PyObject *of, PyObject *kinds) {
    PyTypeObject *cls = Py_TYPE(of);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        PyObject *row = PyTuple_GET_ITEM(kinds, i), *part = NULL;
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != 3) return Py_NewRef(kinds);
        PyObject *name = PyTuple_GET_ITEM(row, 0), *kind = PyTuple_GET_ITEM(row, 1), *others = PyTuple_GET_ITEM(row, 2);
        PyObject *at = cls->tp_getattro == PyObject_GenericGetAttr ? _PyType_Lookup(cls, name) : NULL;
        if (at && Py_IS_TYPE(at, &PyMemberDescr_Type)
            && (PyDescr_TYPE(at) == cls || PyType_IsSubtype(cls, PyDescr_TYPE(at)))) {
            PyMemberDef *member = ((PyMemberDescrObject *)at)->d_member;
            if (member->type == T_OBJECT_EX) part = *(PyObject **)((char *)of + member->offset);
        }
        if (part) Py_INCREF(part);
        else if (!(part = PyObject_GetAttr(of, name))) return NULL;
        PyObject *found = (PyObject *)Py_TYPE(part);
        int fits = found == kind && (!PyFloat_CheckExact(part) || isfinite(PyFloat_AS_DOUBLE(part)));
        Py_ssize_t more = found != kind && PyTuple_CheckExact(others) ? PyTuple_GET_SIZE(others) : 0;
        while (!fits && more--) fits = PyTuple_GET_ITEM(others, more) == found;
        Py_DECREF(part);
        if (!fits) return Py_NewRef(kinds);
    }
    return PyTuple_New(0);
}

/* Raises ImportError if a field of this class is elsewhere than it was for the compiler. */
static int kes_compare(PyObject *cls, const char *field, Py_ssize_t place) {
    PyObject *found = PyObject_GetAttrString(cls, field);
    int same = 0;
    if (found && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        same = member->type == T_OBJECT_EX && member->offset == place;
    }
    Py_XDECREF(found);
    if (!same) {
        PyErr_Clear();
        PyErr_Format(PyExc_ImportError, "the field %s of %S is not where it was when this was compiled", field, cls);
        return -1;
    }
    return 0;
}
"""
GETTER: Final = """
static inline PyObject *kes_{cls}_{field}(Kes{cls} *of) {{
    static const char *const needed[] = {{{needed}, NULL}};
    if ((PyObject *)of != Py_None && {all_set}) return Py_NewRef(of->{field});
    return kes_unset((PyObject *)of, needed);
}}"""
ALLOCATION: Final = """
static inline PyObject *kes_new_{cls}(PyObject *cls, PyObject {arguments}) {{
    Kes{cls} *of = (Kes{cls} *)((PyTypeObject *)cls)->tp_alloc((PyTypeObject *)cls, 0);
    if (!of) return NULL;
{values}
    return (PyObject *)of;
}}"""
PROPERTY: Final = """\
        @property
        cdef inline object {field}(self):
            return kes_{cls}_{field}(self)"""
COMPARED: Final = """\
    if (kes_compare(PyTuple_GET_ITEM(classes, {number}), "{field}", offsetof(Kes{cls}, {field}))) return -1;"""


def main() -> int:
    """Build the leaves that do not run compiled yet; return the exit code."""
    os.environ.pop(PLAIN_VARIABLE, None)
    waiting = [name for name, state in states().items() if state != COMPILED]
    if not waiting:
        return 0
    if missing := missing_tool():
        sys.stdout.write(f"leaves: {missing}: the toolkit runs in plain Python, which is complete and slower\n")
        return 0
    for name in waiting:
        built = build(import_module(name))
        sys.stdout.write(f"leaves: compiled {name} ({built.stat().st_size / 1e3:,.0f} kB)\n")
    return 0


def missing_tool() -> str:
    """Return what keeps this machine from compiling, in a few words; ``""``: nothing."""
    for package in ("Cython", "setuptools"):
        try:
            import_module(package)
        except ImportError:
            return f"{package} is not installed"
    compiler = shlex.split(os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are not installed"
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this interpreter is not one that leaves are compiled for"
    return ""


def build(leaf: ModuleType) -> Path:
    """Compile a leaf, put the file beside its source, remove those of other sources; return the file."""
    source = source_of(leaf.__name__)
    target = built_file(source)
    with TemporaryDirectory(prefix="leaves-") as scratch:
        built = _compiled(leaf, source, Path(scratch))
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(built, draft)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    for other in target.parent.glob(f"{source.stem}.*{SUFFIX}"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _compiled(leaf: ModuleType, source: Path, scratch: Path) -> Path:
    text = source.read_text()
    classes: tuple[type, ...] = leaf.CLASSES
    declarations, header = layouts(classes, fields_set_by(text))
    folder = scratch
    for package in leaf.__name__.split(".")[:-1]:
        folder = folder / package
        folder.mkdir()
        (folder / "__init__.py").touch()
    place = folder / source.name
    place.write_text(f"{rewritten(text, classes)}\nkes_compare_all(CLASSES)\n")
    place.with_suffix(".pxd").write_text(declarations + source.with_suffix(".pxd").read_text())
    (scratch / "layouts.h").write_text(header)
    setuptools = import_module("setuptools")
    cythonize = import_module("Cython.Build").cythonize
    extension = setuptools.Extension(
        leaf.__name__, [str(place)], include_dirs=[str(scratch)], extra_compile_args=["-g0", "-Wno-unused-function"]
    )
    directives = {**DIRECTIVES, "annotation_typing": "# cython: annotation_typing=True" in text}
    modules = cythonize([extension], compiler_directives=directives, include_path=[str(scratch)], quiet=True)
    command = import_module("setuptools.command.build_ext").build_ext(setuptools.Distribution({"ext_modules": modules}))
    command.build_lib = command.build_temp = str(scratch / "out")
    command.ensure_finalized()
    command.run()
    (built,) = map(Path, command.get_outputs())
    return built


def fields_set_by(source: str) -> set[str]:
    """The names of all attributes that are set or deleted in this source."""
    nodes = ast.walk(ast.parse(source))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)}


def fields_of(cls: type) -> list[str]:
    """The fields with a place of their own, in the order of their places."""
    return [
        name
        for base in reversed(cls.__mro__)
        for name in sorted(vars(base))
        if isinstance(vars(base)[name], MemberDescriptorType)
    ]


def rewritten(source: str, classes: tuple[type, ...]) -> str:
    """Write the calls that are done by functions of the header as calls of these, and the classes' names without type
    arguments, which Cython does not take. Lines keep their numbers."""
    lines = source.encode().splitlines(keepends=True)
    begins = [0, *accumulate(len(line) for line in lines)]
    nodes = list(ast.walk(ast.parse(source)))
    named = {cls.__name__: cls for cls in classes}
    found = [(node, _in_c(node, source, named)) for node in nodes if isinstance(node, ast.expr)]
    found += [(node.iter, _of_misfits(node)) for node in nodes if isinstance(node, ast.For)]
    edits: list[tuple[int, int, str]] = []
    for node, new in found:
        if new:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
            edits.append((start, end, new + "\n" * (node.end_lineno - node.lineno)))
    text = source.encode()
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new.encode() + text[end:]
    return text.decode()


def _of_misfits(loop: ast.For) -> str:
    """Return what a loop over the kinds of a value goes over when it is compiled; ``""``: it is another loop."""
    match loop:
        case ast.For(
            ast.Tuple([ast.Name("name"), ast.Name("kind"), ast.Name("others")]),
            ast.Name(kinds),
            [ast.Assign(value=ast.Call(ast.Name("getattr"), [ast.Name(of), ast.Name("name")], [])), *_],
        ):
            return f"kes_misfits({of}, {kinds})"
    return ""


def _in_c(node: ast.expr, source: str, classes: dict[str, type]) -> str:
    """Return what is compiled in place of an expression; ``""``: itself."""
    match node:
        case ast.Call(ast.Name(name), arguments, []) if is_struct(cls := classes.get(name, object)):
            left_out = len(cls.__struct_fields__) - len(arguments)
            defaults = [repr(default) for default in cls.__struct_defaults__[len(cls.__struct_defaults__) - left_out :]]
            given = [ast.get_source_segment(source, argument) or "" for argument in arguments]
            return f"kes_new_{name}({', '.join([name, *given, *defaults])})"
        case ast.Subscript(ast.Name(name)) if name in classes:
            return name
        case ast.Subscript(ast.Call(ast.Attribute(of, "partition"), [ast.Name("NULL")], []), ast.Constant(1)):
            return f"kes_has_null({ast.get_source_segment(source, of)})"
        case ast.Call(ast.Name("join"), [ast.Tuple(parts)], []) if len(parts) == 7 and 'b"".join' in source:
            return f"kes_join7({', '.join(ast.get_source_segment(source, part) or '' for part in parts)})"
        case ast.Call(
            ast.Attribute(ast.Name("int"), "from_bytes"),
            [ast.Subscript(of, ast.Slice(ast.expr() as at, ast.expr() as end)), ast.Constant("little")],
        ):
            return f"kes_little({', '.join(ast.get_source_segment(source, part) or '' for part in (of, at, end))})"
    return ""


def is_struct(cls: type) -> TypeGuard[type[msgspec.Struct]]:
    """Check for a struct whose instances are nothing but their fields, and whose defaults can be written down."""
    if not issubclass(cls, msgspec.Struct) or hasattr(cls, "__post_init__"):
        return False
    return all(isinstance(default, int | str | bytes | None) for default in cls.__struct_defaults__)


def layouts(classes: tuple[type, ...], fields_set: set[str]) -> tuple[str, str]:
    """Write the declarations for Cython, and the C header that they are about."""
    pxd = ["cimport cython", 'cdef extern from "layouts.h":', "    int kes_compare_all(object classes) except -1"]
    pxd.append("    bint kes_has_null(object within) except -1")
    pxd.append("    bytes kes_join7(object a, object b, object c, object d, object e, object f, object g)")
    pxd.append("    tuple kes_misfits(object of, tuple kinds)")
    pxd.append("    unsigned int kes_little(object of, Py_ssize_t at, Py_ssize_t end) except? 0")
    header, compared = [HEADER], []
    for number, cls in enumerate(classes):
        name, fields = cls.__name__, fields_of(cls)
        members = ", ".join(f"*{field}" for field in fields)
        header.append(f"typedef struct {{ PyObject_HEAD PyObject {members}; }} Kes{name};")
        both = [field for field in fields if field in fields_set]
        read = [field for field in fields if field not in both]
        header += [_getter(name, field, [field, *both]) for field in read]
        pxd.append(f"    ctypedef class {cls.__module__}.{name} [object Kes{name}, check_size ignore]:")
        pxd += [f"        cdef object {field}" for field in both]
        pxd += [PROPERTY.format(cls=name, field=field) for field in read]
        pxd += [f"    object kes_{name}_{field}({name} of)" for field in read]
        if is_struct(cls):
            given = cls.__struct_fields__
            header.append(_allocation(name, given))
            pxd.append(f"    object kes_new_{name}(object cls, object {', object '.join(given)})")
        compared += [COMPARED.format(number=number, cls=name, field=field) for field in fields]
    header += ["static int kes_compare_all(PyObject *classes) {", *compared, "    return 0;", "}"]
    return "\n".join([*pxd, "", ""]), "\n".join([*header, ""])


def _allocation(cls: str, fields: tuple[str, ...]) -> str:
    values = "\n".join(f"    of->{field} = Py_NewRef({field});" for field in fields)
    return ALLOCATION.format(cls=cls, arguments=", PyObject ".join(f"*{field}" for field in fields), values=values)


def _getter(cls: str, field: str, needed: list[str]) -> str:
    all_set = " && ".join(f"of->{one}" for one in needed)
    return GETTER.format(cls=cls, field=field, all_set=all_set, needed=", ".join(f'"{one}"' for one in needed))


if __name__ == "__main__":
    sys.exit(main())
