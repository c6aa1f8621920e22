"""What takes time: connections that were open before, and a false curator that waits for others to connect.

`hold` opens connections, and sends a request on each of them every second until it ends. Beside each it makes the same
request on a new connection. `pose` answers in the place of a curator, with one stolen certificate after the other, and with
that of a living curator, which has to be followed: it shows that others would follow a certificate that they accept.
"""

import collections
import itertools
import json
import os
import socket
import ssl
import threading
import time

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from channels import Calls, Ended, Identity, NotServed, Requests
from listeners import CURATOR
from protobuf import all_of, grpc_frame, message, number

INTERVAL = 1
# Seconds for which a false curator shows the same certificate.
SLICE = 12
# An epoch that no cluster of a test has.
FALSE_EPOCH = 900
STATEMENT = f'{CURATOR}.Leader/GetStatement'
WATCH = f'{CURATOR}.Leader/Watch'
# The alerts of TLS that a client sends about the certificate of a server (RFC 8446, section 6.2).
ALERTS = ('bad_certificate', 'unsupported_certificate', 'certificate_revoked', 'certificate_expired', 'certificate_unknown',
          'unknown_ca', 'access_denied', 'decrypt_error')


# ---------------------------------------------------------------- open connections


def curator_probe(target, identity):
    calls = Calls(target.at, identity)
    return lambda: calls.call(f'{CURATOR}.Management/ListNodes')[0] == 'OK'


def http_probe(path):
    def prepare(target, identity):
        requests = Requests(target.at, identity)
        return lambda: requests.request('GET', path)[0] == 200
    return prepare


def agent_probe(machine):
    def prepare(target, identity):
        calls = Calls(target.at, identity)
        body = message(1, machine) + message(2, b'\0' * 32)
        return lambda: calls.call('shepherd.agent.v1.AgentCallback/FetchArtefact', body)[0] == 'NOT_FOUND'
    return prepare


def probes(targets, pairs, machine):
    """Triples of a kind, a target and what prepares the request, for each pair that the listener serves now."""
    pods, secrets = http_probe('/pods'), http_probe('/api/v1/secrets?limit=1')
    known = {
        'curator': [('node', curator_probe), ('curator', curator_probe), ('false-owner', curator_probe)],
        'etcd-peer': [('peer', http_probe('/members')), ('false-peer', http_probe('/members'))],
        'kube-apiserver': [('kube-reconciler', secrets), ('false-master', secrets)],
        'kubelet': [('kube-apiserver-kubelet-client', pods), ('false-master', pods)],
        'kube-controller-manager': [('kube-reconciler', http_probe('/metrics'))],
        'kube-scheduler': [('kube-reconciler', http_probe('/metrics'))],
        'agents': [('agent', agent_probe(machine))],
    }
    for target in targets:
        for pair, prepare in known.get(target.kind, []):
            if pair in pairs:
                yield pair, target, pairs[pair], prepare


class Held:
    """One connection that is kept, or one request on a new connection each second."""

    def __init__(self, name, target, identity, prepare, is_kept):
        self.name = f'{"open" if is_kept else "new"} {name} {target.kind} {target.machine}'
        self.target, self.identity, self.prepare, self.is_kept = target, identity, prepare, is_kept
        self.served, self.last, self.answer = 0, None, ''

    def run(self, stop):
        send = self.prepare(self.target, self.identity)
        while not stop.is_set():
            began = time.time()
            if not self.is_kept:
                send = self.prepare(self.target, self.identity)
            try:
                served, self.answer = send(), 'rejected'
            except (Ended, NotServed) as error:
                served, self.answer = False, str(error)
                if self.is_kept and self.served:
                    # The connection has ended.
                    return
            if served:
                # The moment at which the request began: what was served later was served for longer.
                self.served, self.last, self.answer = self.served + 1, began, 'served'
            stop.wait(INTERVAL)


def hold(targets, pairs, machine, out):
    """Until the file `OUT.stop` exists. The state of each connection is in OUT, which is replaced every second."""
    stop, held = threading.Event(), []
    for name, target, identity, prepare in probes(targets, pairs, machine):
        held += [Held(name, target, identity, prepare, is_kept) for is_kept in (True, False)]
    threads = [threading.Thread(target=one.run, args=(stop,), daemon=True) for one in held]
    for thread in threads:
        thread.start()
    while True:
        state = {one.name: {'served': one.served, 'last': one.last, 'answer': one.answer} for one in held}
        with open(f'{out}.new', 'w') as file:
            json.dump(state, file)
        os.replace(f'{out}.new', out)
        if os.path.exists(f'{out}.stop'):
            stop.set()
            return
        time.sleep(1)


# ---------------------------------------------------------------- a false curator


def alert_of(error):
    """The alert about our certificate that ended a handshake; None if something else ended it."""
    reason = (getattr(error, 'reason', None) or '').lower().replace(' ', '_')
    return next((alert.replace('_', ' ') for alert in ALERTS if reason.endswith(f'alert_{alert}')), None)


class FalseCurator:
    """Listens at the place of a curator until others have refused each of the certificates, and have followed the control.

    Each is shown for some seconds, because others connect once for the statement, which any node of the cluster may send,
    and then to follow.
    """

    def __init__(self, at, identities, control, node, statement):
        self.node, self.statement, self.identities, self.control = node, statement, identities, control
        # By the name of what was shown: the alerts about it, handshakes that ended without one, and the calls of others.
        self.refused, self.ended, self.calls = collections.Counter(), collections.Counter(), collections.Counter()
        self.socket = socket.create_server(at)

    def is_done(self):
        refused = {name for name, _ in self.refused.copy()}
        return self.calls[self.control.name, WATCH] and all(one.name in refused for one in self.identities)

    def serve(self, seconds):
        self.socket.settimeout(0.5)
        last = time.monotonic() + seconds
        for identity in itertools.cycle([*self.identities, self.control]):
            if time.monotonic() > last or self.is_done():
                return
            end = time.monotonic() + SLICE
            while time.monotonic() < end:
                try:
                    plain, _ = self.socket.accept()
                except TimeoutError:
                    continue
                threading.Thread(target=self.answer, args=(plain, identity), daemon=True).start()

    def answer(self, plain, identity):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(f'{identity.pair}.crt', f'{identity.pair}.key')
        context.set_alpn_protocols(['h2'])
        plain.settimeout(30)
        try:
            stream = context.wrap_socket(plain, server_side=True)
        except OSError as error:
            # Only an alert about the certificate is a refusal of it.
            if alert := alert_of(error):
                self.refused[identity.name, alert] += 1
            else:
                self.ended[identity.name, str(error)] += 1
            return
        try:
            self.exchange(stream, identity)
        except (OSError, h2.exceptions.ProtocolError):
            pass
        finally:
            stream.close()

    def exchange(self, stream, identity):
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding='utf-8'))
        connection.initiate_connection()
        stream.sendall(connection.data_to_send())
        while raw := stream.recv(65536):
            for event in connection.receive_data(raw):
                if isinstance(event, h2.events.RequestReceived):
                    path = dict(event.headers)[':path'].removeprefix('/')
                    self.calls[identity.name, path] += 1
                    self.respond(connection, event.stream_id, path, identity)
                elif isinstance(event, h2.events.DataReceived):
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            stream.sendall(connection.data_to_send())

    def respond(self, connection, stream, path, identity):
        connection.send_headers(stream, [(':status', '200'), ('content-type', 'application/grpc')])
        body = None
        if path == STATEMENT:
            body = self.statement
        elif path == WATCH and identity is not self.control:
            body = message(1, self.node) + message(4, self.node) + number(5, FALSE_EPOCH)
        if body is not None:
            connection.send_data(stream, grpc_frame(body))
        # Who follows the control gets no answer with which it would continue.
        if not path.endswith('Watch') or identity is self.control:
            status = '0' if body is not None else '14'
            connection.send_headers(stream, [('grpc-status', status)], end_stream=True)


def newest_statement(targets):
    """The response with the newest statement, from a true curator."""
    newest, response = -1, None
    for target in targets:
        if target.kind != 'curator':
            continue
        try:
            code, _, found = Calls(target.at, Identity('nobody/none')).call(STATEMENT)
        except (Ended, NotServed):
            continue
        if code == 'OK':
            statement = all_of(all_of(found, 1)[0], 1)[0]
            if (count := all_of(statement, 4)[0]) > newest:
                newest, response = count, found
    if response is None:
        raise SystemExit('no curator has a statement')
    return response


def pose(attempts, at, identities, control, node, statement, seconds):
    """Records what others did with each certificate. The only call that is no belief is that for the statement.

    `control` is the pair of a living curator. Its certificate has to be followed: the leader is requested of it.
    """
    curator = FalseCurator(at, identities, control, node, statement)
    curator.serve(seconds)
    for (name, reason), count in sorted(curator.ended.items()):
        print(f'# {name}: {count} handshakes ended without an alert about the certificate: {reason}')
    for (name, alert), count in sorted(curator.refused.items()):
        # Nobody may refuse the control.
        outcome = 'refused' if name != control.name else 'not tried'
        for _ in range(count):
            attempts.record(Identity(name), 'followers', 'its certificate', f'TLS {alert}', outcome)
    refused = {name for name, _ in curator.refused}
    for identity in identities:
        if identity.name not in refused:
            attempts.record(identity, 'followers', 'its certificate', 'nobody refused it', 'not tried')
    if followed := curator.calls[control.name, WATCH]:
        print(f'# control: {control.name}, the pair of a living curator, was followed {followed} times')
    else:
        attempts.record(control, 'followers', 'its certificate', 'nobody followed it', 'not tried')
    for (name, path), count in sorted(curator.calls.items()):
        short = path.removeprefix(f'{CURATOR}.')
        outcome = 'entitled' if path == STATEMENT or name == control.name else 'SUCCEEDED'
        for _ in range(count):
            attempts.record(Identity(name), 'followers', short, 'sent', outcome)
