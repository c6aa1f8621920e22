"""The attempts: each is compared with the table of entitlements, counted and printed.

The outcome of an attempt is

    refused     the answer is a refusal of that listener
    entitled    the table permits this answer to those keys
    SUCCEEDED   any other answer
    not tried   nobody listens, or nothing arrives
"""

import collections
import fnmatch
import json
import os
import threading
import time

from channels import Ended, NotServed

# The answers of each listener that are refusals, as patterns of requests and answers. Each other answer needs a row in the
# table.
CLOSED = ('*', 'closed'), ('*', 'TLS *')
REFUSALS = {
    'curator': (
        ('*', 'UNAUTHENTICATED'), ('*', 'PERMISSION_DENIED'),
        # A curator that does not lead has no other calls than those about the leader.
        ('*', 'UNIMPLEMENTED'),
        # The caller is a node, and has no role for which it would be served, or its key is that of no node.
        ('Nodes/Issue*', 'FAILED_PRECONDITION'), ('Kubernetes/IssueCertificate *', 'FAILED_PRECONDITION'),
        ('Kubernetes/GetSigningKey', 'FAILED_PRECONDITION'), ('Registration/*', 'FAILED_PRECONDITION'),
        ('Registration/*', 'NOT_FOUND'),
        # The node claims the address of somebody else.
        ('Nodes/UpdateStatus own at *', 'FAILED_PRECONDITION')),
    'etcd-peer': CLOSED,
    'kube-apiserver': (('*', '401'), ('*', '403')),
    'kubelet': (('*', '401'), ('*', '403')),
    'kube-controller-manager': (('*', '401'), ('*', '403')),
    'kube-scheduler': (('*', '401'), ('*', '403')),
    'agents': (('*', 'UNAUTHENTICATED'), ('*', 'PERMISSION_DENIED'), *CLOSED),
    'fleet-api': (('*', 'UNAUTHENTICATED'), ('*', '401'), *CLOSED),
    'sshd': (('*', 'permission denied'),),
    'loopback': (('*', 'nothing arrives'), ('*', 'connection refused')),
    'unknown': (),
}


class Table:
    """Rows of `WHO LISTENER REQUEST ANSWER`, which are patterns."""

    def __init__(self, path):
        self.rows = []
        with open(path) as file:
            for line in file:
                row = line.split('#')[0].split()
                if row:
                    if len(row) != 4:
                        raise SystemExit(f'{path}: not four columns: {line}')
                    self.rows.append(row)

    def entitles(self, *attempt):
        return any(all(fnmatch.fnmatchcase(text.replace(' ', '_'), pattern) for text, pattern in
                       zip(attempt, row, strict=True)) for row in self.rows)


class Attempts:
    def __init__(self, table):
        self.table = table
        self.counts = collections.Counter()
        self.lock, self.shown = threading.Lock(), set()
        # Requests to each kind of listener that were answered by one that serves them.
        self.reached = collections.defaultdict(set)
        # How often a request to an address found nobody.
        self.missed = collections.Counter()
        # The addresses that were tried.
        self.tried = set()

    def attempt(self, identity, listener, at, request, make):
        """Makes one attempt. `make` returns the answer, and perhaps a text about it."""
        text = ''
        try:
            answer = make() if listener == 'loopback' else self.patiently(at, make)
            if isinstance(answer, tuple):
                answer, text = answer
        except Ended as error:
            answer = str(error)
        except NotServed as error:
            answer = str(error).lower()
            if listener != 'loopback':
                self.record(identity, listener, request, answer, 'not tried')
                return answer
            answer = 'connection refused' if 'refused' in answer else 'nothing arrives'
        with self.lock:
            self.tried.add(at)
        refused = any(fnmatch.fnmatchcase(request, one) and fnmatch.fnmatchcase(answer, other)
                      for one, other in REFUSALS[listener])
        if refused:
            outcome = 'refused'
        elif self.table.entitles(identity.name, listener, request, answer):
            outcome = 'entitled'
        else:
            outcome = 'SUCCEEDED'
            self.show(identity, listener, at, f'{request}: {answer} {text[:200]}')
        if answer != 'UNIMPLEMENTED':
            with self.lock:
                self.reached[listener].add(request)
        self.record(identity, listener, request, answer, outcome)
        return answer

    def patiently(self, at, make):
        """Waits a minute for a listener that restarts, and no longer than that for all requests to it."""
        while True:
            try:
                return make()
            except NotServed:
                with self.lock:
                    self.missed[at] += 1
                    is_over = self.missed[at] > 30
                if is_over:
                    raise
                time.sleep(2)

    def show(self, identity, listener, at, text):
        """Prints the first success of each kind."""
        with self.lock:
            is_first = (identity.name, listener) not in self.shown
            self.shown.add((identity.name, listener))
        if is_first:
            print(f'# {identity.name} {listener} {at[0]}:{at[1]} {" ".join(text.split())}')

    def record(self, identity, listener, request, answer, outcome):
        with self.lock:
            self.counts[outcome, identity.name, listener, answer, request] += 1

    def total(self, outcome):
        return sum(count for (one, *_), count in self.counts.items() if one == outcome)

    def print(self):
        """A line for each kind of attempt, with the requests that got this answer."""
        kinds = collections.defaultdict(collections.Counter)
        for (outcome, who, listener, answer, request), count in self.counts.items():
            kinds[outcome, who, listener, answer][request] += count
        for (outcome, who, listener, answer), requests in sorted(kinds.items()):
            few = outcome != 'refused' or len(requests) <= 6
            named = ', '.join(sorted(requests)) if few else f'{len(requests)} requests'
            print(f'{outcome:9} {who:22} {listener:24} {answer:22} {requests.total():5}  {named}')
        totals = ', '.join(f'{self.total(outcome)} {outcome}' for outcome in ('refused', 'entitled', 'SUCCEEDED', 'not tried'))
        print(f'{self.counts.total()} attempts of {len(kinds)} kinds: {totals}')

    def save(self, path):
        kept = {'attempts': self.counts.total(), 'kinds': len({key[:4] for key in self.counts})}
        kept.update({outcome: self.total(outcome) for outcome in ('refused', 'entitled', 'SUCCEEDED', 'not tried')})
        old = []
        if os.path.exists(path):
            with open(path) as file:
                old = json.load(file)
        with open(path, 'w') as file:
            json.dump([*old, kept], file)
