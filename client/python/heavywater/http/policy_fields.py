"""The `heavywater` object of a request: PolicyOptions by the API's names, and two fields more."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from heavywater.http.fields import Fields
from heavywater.v1 import common_pb2

_INTEGER_BITS = {FieldDescriptor.TYPE_INT32: 31, FieldDescriptor.TYPE_INT64: 63}
_MAX_DOUBLE = 1.7e308


def policy_of(fields: Fields) -> common_pb2.PolicyOptions | None:
    """What the request asks for, None when it asks for nothing. Raises ApiError naming the field.

    Ranges are the server's to check.
    """
    options = common_pb2.PolicyOptions()
    for field in common_pb2.PolicyOptions.DESCRIPTOR.fields:
        value = _value(fields, field)
        if value is not None:
            setattr(options, field.name, value)
    return options if options.ListFields() else None


def _value(fields: Fields, field: Any) -> str | bool | int | float | None:
    if fields.take(field.name) is None:
        return None
    if field.type == FieldDescriptor.TYPE_STRING:
        return fields.text(field.name)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return fields.boolean(field.name)
    if field.type in _INTEGER_BITS:
        limit: int = 2 ** _INTEGER_BITS[field.type]
        return fields.integer(field.name, -limit, limit - 1)
    return fields.number(field.name, -_MAX_DOUBLE, _MAX_DOUBLE)
