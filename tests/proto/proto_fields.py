"""What clients and servers of other versions rely on, one line for each field, enum value and call.

python tests/proto/proto_fields.py     adds to fields.txt what is new; never changes or removes a line
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

LIST = Path(__file__).parent / "fields.txt"


def read_list() -> dict[str, str]:
    """Name -> what it is."""
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    return dict(line.split(" = ", 1) for line in lines if line and not line.startswith("#"))


def files() -> Iterator[FileDescriptorProto]:
    package = importlib.import_module("heavywater.v1")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.endswith("_pb2"):
            file = FileDescriptorProto()
            importlib.import_module(f"heavywater.v1.{module.name}").DESCRIPTOR.CopyToProto(file)
            yield file


def current() -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files():
        for message in file.message_type:
            found |= message_lines(file.package, message)
        for enum in file.enum_type:
            found |= enum_lines(file.package, enum)
        for service in file.service:
            found |= service_lines(file.package, service)
    return found


def message_lines(scope: str, message: DescriptorProto) -> dict[str, str]:
    name = f"{scope}.{message.name}"
    found = {f"{name}.{field.name}": field_text(field, message) for field in message.field}
    for nested in message.nested_type:
        found |= message_lines(name, nested)
    for enum in message.enum_type:
        found |= enum_lines(name, enum)
    return found


def field_text(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Number, type and how many: all that the wire depends on, beside the name for JSON."""
    parts = [str(field.number)]
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        parts.append("repeated")
    elif field.proto3_optional:
        parts.append("optional")
    elif field.HasField("oneof_index"):
        parts.append(f"oneof {message.oneof_decl[field.oneof_index].name}")
    parts.append(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())
    parts.append(field.type_name.removeprefix("."))
    return " ".join(parts).strip()


def enum_lines(scope: str, enum: EnumDescriptorProto) -> dict[str, str]:
    return {f"{scope}.{enum.name}.{value.name}": f"{value.number} value" for value in enum.value}


def service_lines(scope: str, service: ServiceDescriptorProto) -> dict[str, str]:
    found = {}
    for method in service.method:
        takes = "stream " * method.client_streaming + method.input_type.removeprefix(".")
        gives = "stream " * method.server_streaming + method.output_type.removeprefix(".")
        found[f"{scope}.{service.name}.{method.name}"] = f"rpc ({takes}) returns ({gives})"
    return found


def breaks(recorded: dict[str, str], now: dict[str, str]) -> list[str]:
    """What somebody who was built against `recorded` would trip over."""
    found = []
    for name, text in recorded.items():
        if name not in now:
            found.append(f"{name} ({text}) has gone")
        elif now[name] != text:
            found.append(f"{name} was {text} and is {now[name]}")
    numbers = {(name.rpartition(".")[0], text.split()[0]): name for name, text in recorded.items()}
    for name, text in now.items():
        before = numbers.get((name.rpartition(".")[0], text.split()[0]))
        if name not in recorded and not text.startswith("rpc") and before is not None:
            found.append(f"{name} takes the number {text.split()[0]} of {before}")
    return found


def main() -> None:
    recorded = read_list()
    added = {name: text for name, text in current().items() if name not in recorded}
    lines = [f"{name} = {text}" for name, text in sorted((added | recorded).items())]
    head = [
        "# Fields, enum values and calls of proto/heavywater/v1; see proto_fields.py. A line that changes or",
        "# goes breaks whoever runs another version.",
    ]
    LIST.write_text("\n".join(head + lines) + "\n")
    print(f"{LIST}: {len(added)} added")


if __name__ == "__main__":
    main()
