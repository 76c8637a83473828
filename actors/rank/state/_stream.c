/* Copies memory past the caches, one stretch from its beginning to its end.

   A snapshot reads and writes each byte of the state once, and does not need it again soon. memcpy does not know that. For large sizes
   glibc copies two or four pages in turns, which takes a core of an EPYC half as long again. It also reads the state into the caches,
   which pushes out the data of computing threads. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#ifndef __SSE2__
#error "without non-temporal stores of x86-64 memmove does as well: Fleet uses that where this file was not compiled"
#endif
#include <emmintrin.h>

enum { LINE = 64, AHEAD = 16 * LINE };

static void stream_lines(char *to, const char *from, size_t lines)
{
    for (; lines; lines--, to += LINE, from += LINE) {
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA); /* after the end it has no effect */
        const __m128i *in = (const __m128i *)from;
        __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1), c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
        __m128i *out = (__m128i *)to;
        _mm_stream_si128(out, a);
        _mm_stream_si128(out + 1, b);
        _mm_stream_si128(out + 2, c);
        _mm_stream_si128(out + 3, d);
    }
    _mm_sfence(); /* so a thread that learns of the end of the copy sees all of it */
}

static void copy(char *to, const char *from, size_t size)
{
    size_t head = (LINE - (uintptr_t)to % LINE) % LINE;
    if (head > size)
        head = size;
    size_t lines = (size - head) / LINE, tail = head + lines * LINE;
    memcpy(to, from, head);
    stream_lines(to + head, from + head, lines);
    memcpy(to + tail, from + tail, size - tail);
}

static PyObject *stream_copy(PyObject *module, PyObject *arguments)
{
    unsigned long long to, from;
    Py_ssize_t size;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKn:copy", &to, &from, &size))
        return NULL;
    if (size < 0)
        return PyErr_Format(PyExc_ValueError, "size = %zd: must not be negative", size);
    Py_BEGIN_ALLOW_THREADS
    copy((char *)(uintptr_t)to, (const char *)(uintptr_t)from, (size_t)size);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", stream_copy, METH_VARARGS,
     "copy(to, from, size): copies so many bytes between addresses that do not overlap, without the interpreter's lock"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_stream", "Copies past the caches.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stream(void)
{
    return PyModule_Create(&definition);
}
