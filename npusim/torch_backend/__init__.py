"""Torch's device ``npu`` in Python: storages of true size, dispatch, values, registration.

The one room with process-wide state (:mod:`npusim.torch_backend.registration`), because torch allows a backend to be
registered once per process.
"""
