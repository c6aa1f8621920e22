"""Messages of protocol buffers, as far as end-to-end tests write and read them without generated code."""


def varint(value):
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def number(field, value):
    return varint(field << 3) + varint(value)


def message(field, *parts):
    body = b''.join(part.encode() if isinstance(part, str) else part for part in parts)
    return varint(field << 3 | 2) + varint(len(body)) + body


def fields(body):
    """The fields of a message as pairs of number and value, which is a number or bytes."""
    position = 0

    def read_varint():
        nonlocal position
        value = shift = 0
        while True:
            byte = body[position]
            position, value, shift = position + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while position < len(body):
        tag = read_varint()
        match tag & 7:
            case 0:
                value = read_varint()
            case 2:
                length = read_varint()
                value, position = body[position:position + length], position + length
            case 1 | 5 as kind:
                length = 8 if kind == 1 else 4
                value, position = body[position:position + length], position + length
            case kind:
                raise ValueError(f'a field has the unknown type {kind}')
        yield tag >> 3, value


def all_of(body, wanted):
    return [value for field, value in fields(body) if field == wanted]


def grpc_frame(body):
    """A message as gRPC frames it, without compression."""
    return b'\0' + len(body).to_bytes(4, 'big') + body
