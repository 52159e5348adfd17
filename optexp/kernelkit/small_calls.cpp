// The common yes of optexp/kernel.py to "is this call small?". Whatever is out of the ordinary is left to Python, whose
// limits and rehearsals are looked up among the function's globals, as they are at the time.

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

PyObject *small_key, *learning_key, *rehearsals_key;

bool is_number(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
    case at::kBFloat16:
    case at::kHalf:
    case at::kDouble:
      return true;
    default:
      return false;
  }
}

double limit(PyObject* globals, bool learns) {
  const double small = PyFloat_AsDouble(PyDict_GetItem(globals, small_key));
  return learns ? small * PyFloat_AsDouble(PyDict_GetItem(globals, learning_key)) : small;
}

// While a graph is traced outside of Dynamo, which is shown Python's, tensors are of another type.
bool is_small(PyObject* globals, PyObject* argument, PyObject* operations) {
  if (PyList_Size(PyDict_GetItem(globals, rehearsals_key)) != 0 || !THPVariable_CheckExact(argument)) return false;
  const at::Tensor& x = THPVariable_Unpack(argument);
  if (x.device().type() != at::DeviceType::DEVICE || !is_number(x)) return false;
  const bool learns = x.requires_grad() && at::GradMode::is_enabled();
  const double times = operations ? PyFloat_AsDouble(operations) : 1.0;  // -1 where it is no number
  if (!(times >= 0 && x.numel() * times < limit(globals, learns))) return false;
  // The default stream, which nobody captures. Another device's headers would be needed to ask it without this guard.
  return c10::impl::VirtualGuardImpl(x.device().type()).getStream(x.device()).id() == 0;
}

bool one(PyObject* globals, PyObject* const* args, Py_ssize_t count) {
  return (count == 1 || count == 2) && is_small(globals, args[0], count == 2 ? args[1] : nullptr);
}

// Whether the first is small, and the second of its dtype and of its last dimension only, or of all.
bool both(PyObject* globals, PyObject* const* args, Py_ssize_t count, bool only_last) {
  if (count != 3 || !is_small(globals, args[0], args[2]) || !THPVariable_CheckExact(args[1])) return false;
  const at::Tensor &x = THPVariable_Unpack(args[0]), &other = THPVariable_Unpack(args[1]);
  if (other.scalar_type() != x.scalar_type() || x.dim() == 0) return false;
  return other.sizes() == x.sizes().slice(only_last ? x.dim() - 1 : 0);
}

bool with_row(PyObject* globals, PyObject* const* args, Py_ssize_t count) { return both(globals, args, count, true); }

bool alike(PyObject* globals, PyObject* const* args, Py_ssize_t count) { return both(globals, args, count, false); }

template <bool (*is_certain)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* answer(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  try {
    if (is_certain(PyFunction_GetGlobals(function), args, count)) Py_RETURN_TRUE;
  } catch (...) {  // a tensor that has no sizes, for one
  }
  return PyErr_Occurred() ? nullptr : PyObject_Vectorcall(function, args, count, nullptr);
}

template <bool (*is_certain)(PyObject*, PyObject* const*, Py_ssize_t)>
constexpr PyMethodDef named(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&answer<is_certain>)), METH_FASTCALL, nullptr};
}

PyMethodDef answers[] = {named<one>("is_small"), named<with_row>("is_small_with_row"), named<alike>("are_small_alike")};

// quick(function): what answers for the function of this name, and asks it where it is not certain.
PyObject* quick(PyObject* module, PyObject* function) {
  if (!PyFunction_Check(function)) return PyErr_Format(PyExc_TypeError, "%R is no function", function);
  PyObject* name = PyObject_GetAttrString(function, "__name__");
  if (!name) return nullptr;
  PyMethodDef* found = nullptr;
  for (PyMethodDef& method : answers)
    if (PyUnicode_CompareWithASCIIString(name, method.ml_name) == 0) found = &method;
  Py_DECREF(name);
  if (!found) return PyErr_Format(PyExc_ValueError, "nothing answers for %R", function);
  return PyCFunction_New(found, function);
}

PyMethodDef methods[] = {{"quick", quick, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef description = {PyModuleDef_HEAD_INIT, "small_calls", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_small_calls() {
  small_key = PyUnicode_InternFromString("SMALL");
  learning_key = PyUnicode_InternFromString("LEARNING");
  rehearsals_key = PyUnicode_InternFromString("rehearsals");
  return PyModule_Create(&description);
}
