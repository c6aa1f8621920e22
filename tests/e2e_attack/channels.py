"""Connections of the attacker: TLS with any pair of certificate and key, and on it calls of gRPC and requests of HTTP.

The attacker verifies nobody: it wants to reach the listener at an address, and each run shows by control attempts which
listener that is.
"""

import contextlib
import dataclasses
import glob
import http.client
import re
import socket
import ssl
import urllib.parse

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions

from protobuf import grpc_frame

TIMEOUT = 10
# Seconds for the first message of a stream that was accepted.
FIRST_MESSAGE = 1
CODES = ('OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED '
         'RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS '
         'UNAUTHENTICATED').split()


@dataclasses.dataclass(frozen=True)
class Identity:
    """What the attacker shows. `name` is `WHO/WHAT`, as the table of entitlements has it."""
    name: str
    # A path without `.crt` and `.key`; None without a certificate.
    pair: str | None = None
    token: str | None = None
    headers: tuple = ()


class Ended(Exception):
    """The other end refused or ended the connection. The text is the answer."""


class NotServed(Exception):
    """Nobody listens, or nothing arrives: no attempt was made."""


@contextlib.contextmanager
def answers():
    """Turns the errors of a connection into answers."""
    try:
        yield
    except (Ended, NotServed):
        raise
    except ssl.SSLEOFError as error:
        raise Ended('closed') from error
    except ssl.SSLError as error:
        raise Ended(f'TLS {(error.reason or "ended").lower().replace("_", " ")}') from error
    except (ConnectionResetError, BrokenPipeError, EOFError, http.client.HTTPException) as error:
        raise Ended('closed') from error
    except TimeoutError as error:
        raise NotServed('nothing arrives') from error
    except OSError as error:
        raise NotServed(str(error)) from error


def connect(address, identity, protocols=()):
    """A TLS connection. The other end may still refuse the certificate, at the first byte."""
    with answers():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if identity.pair:
            context.load_cert_chain(f'{identity.pair}.crt', f'{identity.pair}.key')
        if protocols:
            context.set_alpn_protocols(list(protocols))
        try:
            plain = socket.create_connection(address, timeout=TIMEOUT)
        except ConnectionResetError as error:
            raise NotServed(str(error)) from error
        return context.wrap_socket(plain)


# ---------------------------------------------------------------- gRPC


def methods(directory, package):
    """Every method of the contracts below a directory, as `package.Service/Method`."""
    found = []
    for path in sorted(glob.glob(f'{directory}/**/*.proto', recursive=True)):
        with open(path) as file:
            text = re.sub(r'//.*', '', file.read())
        (own,) = re.findall(r'^package ([\w.]+);', text, re.MULTILINE)
        if own != package:
            continue
        for service, body in re.findall(r'^service (\w+) \{(.*?)^\}', text, re.MULTILINE | re.DOTALL):
            found += [f'{own}.{service}/{method}' for method in re.findall(r'\brpc (\w+)\s*\(', body)]
    if not found:
        raise SystemExit(f'no methods of {package} below {directory}')
    return found


class Calls:
    """Calls on one connection of HTTP/2, which begins again for the next call after it has ended."""

    def __init__(self, address, identity, plain=None):
        self.address, self.identity, self.plain = address, identity, plain
        self.socket = self.connection = None

    def open(self):
        with answers():
            if self.plain:
                self.socket = socket.socket(socket.AF_UNIX)
                self.socket.settimeout(TIMEOUT)
                self.socket.connect(self.plain)
            else:
                self.socket = connect(self.address, self.identity, ['h2'])
            self.connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding='utf-8'))
            self.connection.initiate_connection()
            self.socket.sendall(self.connection.data_to_send())

    def close(self):
        if self.socket:
            self.socket.close()
        self.socket = self.connection = None

    def call(self, method, body=b''):
        """The code of the first answer, its text, and the first message."""
        try:
            if not self.socket:
                self.open()
            with answers():
                return self.exchange(method, body)
        except (Ended, NotServed):
            self.close()
            raise
        except (h2.exceptions.ProtocolError, KeyError) as error:
            self.close()
            raise Ended('closed') from error

    def exchange(self, method, body):
        stream = self.connection.get_next_available_stream_id()
        headers = [(':method', 'POST'), (':scheme', 'https'), (':authority', self.identity.name.replace('/', '-')),
                   (':path', f'/{method}'), ('content-type', 'application/grpc'), ('te', 'trailers')]
        if self.identity.token:
            headers.append(('authorization', f'Bearer {self.identity.token}'))
        self.connection.send_headers(stream, headers)
        self.connection.send_data(stream, grpc_frame(body), end_stream=True)
        self.socket.sendall(self.connection.data_to_send())
        received, data, accepted = {}, b'', False
        while True:
            self.socket.settimeout(FIRST_MESSAGE if accepted else TIMEOUT)
            try:
                raw = self.socket.recv(65536)
            except TimeoutError:
                if not accepted:
                    raise
                return self.leave(stream, 'a stream', data)
            if not raw:
                raise Ended('closed')
            for event in self.connection.receive_data(raw):
                if isinstance(event, h2.events.ConnectionTerminated):
                    raise Ended('closed')
                if getattr(event, 'stream_id', None) != stream:
                    continue
                if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                    received.update(event.headers)
                    accepted = received.get(':status') == '200'
                elif isinstance(event, h2.events.DataReceived):
                    data += event.data
                    self.connection.acknowledge_received_data(event.flow_controlled_length, stream)
                elif isinstance(event, h2.events.StreamReset):
                    raise Ended('closed')
                elif isinstance(event, h2.events.StreamEnded):
                    self.socket.sendall(self.connection.data_to_send())
                    return self.result(received, data)
            self.socket.sendall(self.connection.data_to_send())

    def leave(self, stream, text, data):
        self.connection.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        self.socket.sendall(self.connection.data_to_send())
        return 'OK', text, self.first(data)

    def result(self, received, data):
        if 'grpc-status' not in received:
            return f'HTTP {received.get(":status")}', '', data
        code = CODES[int(received['grpc-status'])]
        return code, urllib.parse.unquote(received.get('grpc-message', '')), self.first(data)

    @staticmethod
    def first(data):
        return data[5:5 + int.from_bytes(data[1:5], 'big')] if len(data) >= 5 else b''


# ---------------------------------------------------------------- HTTP


class Requests:
    """Requests of HTTP/1.1 on one connection, which begins again for the next request after it has ended."""

    def __init__(self, address, identity, is_plain=False):
        self.address, self.identity, self.is_plain, self.connection = address, identity, is_plain, None

    def request(self, verb, path, body=None, headers=()):
        """The status and the body of the answer, of which 64 KiB are read."""
        try:
            with answers():
                if not self.connection:
                    self.connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT)
                    if not self.is_plain:
                        self.connection.sock = connect(self.address, self.identity)
                sent = {'Content-Type': 'application/json', **dict(self.identity.headers), **dict(headers)}
                if self.identity.token:
                    sent['Authorization'] = f'Bearer {self.identity.token}'
                self.connection.request(verb, path, body, sent)
                answer = self.connection.getresponse()
                text = answer.read(65536)
                if not answer.isclosed() or answer.will_close or answer.status == 101:
                    self.close()
                return answer.status, text
        except (Ended, NotServed):
            self.close()
            raise

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None
