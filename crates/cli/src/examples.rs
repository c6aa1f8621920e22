//! Examples in the help of each command. Every command that uses the API of a context has one.

/// Examples in the help of `get machines`.
pub const GET_MACHINES: &str = "\
Examples:
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl get machines --label row=7
  shepherdctl get machines --provider rack-a --limit 1000 -o json";

/// Examples in the help of `get sessions`.
pub const GET_SESSIONS: &str = "\
Example:
  shepherdctl get sessions --context prod";

/// Examples in the help of `get work`.
pub const GET_WORK: &str = "\
Example:
  shepherdctl get work --limit 20";

/// Examples in the help of `get providers`.
pub const GET_PROVIDERS: &str = "\
Example:
  shepherdctl get providers -o yaml";

/// Examples in the help of `get loops`.
pub const GET_LOOPS: &str = "\
Example:
  shepherdctl get loops                         which are paused, by whom and why";

/// Examples in the help of `get approvals`.
pub const GET_APPROVALS: &str = "\
Example:
  shepherdctl get approvals -o json | jq -r '.approvals[] | select(.state == \"waiting\").approval_id'";

/// Examples in the help of `approve`.
pub const APPROVE: &str = "\
Example:
  shepherdctl approve 0d9e2a4c-6f1b-4c7e-9a53-2b8f6c1d7e90 --reason 'I looked at the row'

The requester cannot approve the order: the approver needs another credential and another name. After the
approval the requester gives the same order again, with the idempotency key of the first answer.";

/// Examples in the help of `get budgets`.
pub const GET_BUDGETS: &str = "\
Example:
  shepherdctl get budgets -o json | jq -r '.budgets[] | select(.available | not) | .budget'";

/// Examples in the help of `get brakes`.
pub const GET_BRAKES: &str = "\
Example:
  shepherdctl get brakes                        which hold, and what engages each";

/// Examples in the help of `budget set`.
pub const BUDGET_SET: &str = "\
Examples:
  shepherdctl budget set reboot --max_count 50 --reason 'the new kernel is rolled out'
  shepherdctl budget set power-cycle --max_count 0 --reason 'the feed is repaired'
  shepherdctl budget set release --max_count 200 --window 1h --reason 'two rows go'

It is kept in the policy of the database, and counts with the next step in every shepherd. No flag
of a shepherd writes a budget, so that it stays when one is started again. Work that waits for a budget
tries again at its scheduled time.";

/// Examples in the help of `cluster create`.
pub const CLUSTER_CREATE: &str = "\
Examples:
  shepherdctl cluster create ams --workers 5 --reason 'the new hall'
  shepherdctl cluster create edge --selector 'location=ams,memory>=64GiB' --reason 'a trial'

Machines are chosen that are Ready and that nobody has other plans for, at as many locations as can be.
The first one founds the cluster; the others are let in by the key that each reported over its agent
channel. TERMS are provider=, location=, manufacturer=, product=, label.KEY=, memory>= and cpus>=,
separated by commas; all of them must hold.";

/// Examples in the help of `cluster get`.
pub const CLUSTER_GET: &str = "\
Example:
  shepherdctl cluster get -o json | jq -r '.clusters[] | select(.stage != \"converged\") | .name'";

/// Examples in the help of `cluster describe`.
pub const CLUSTER_DESCRIBE: &str = "\
Example:
  shepherdctl cluster describe ams              its machines, and what each waits for";

/// Examples in the help of `cluster plan`.
pub const CLUSTER_PLAN: &str = "\
Examples:
  shepherdctl cluster plan ams                  what will be done to it, and what it waits for then
  shepherdctl cluster plan ams --workers 3      which machines would leave
  shepherdctl cluster plan new --control_plane 3 --workers 5 --selector location=ams
                                                which machines would be chosen for a cluster that there is not yet";

/// Examples in the help of `cluster scale`.
pub const CLUSTER_SCALE: &str = "\
Examples:
  shepherdctl cluster scale ams --workers 8 --reason 'more load'
  shepherdctl cluster scale ams --control_plane 5 --reason 'to bear two losses'

Machines that are too many leave: those that are not well first, then those that were chosen last;
members of the control plane one at a time.";

/// Examples in the help of `cluster roles`.
pub const CLUSTER_ROLES: &str = "\
Example:
  shepherdctl cluster roles ams --add_role web --remove_role old-web --reason 'the new front'

A role has to be declared to the cluster before nodes can have it: shepherdctl cluster declare.";

/// Examples in the help of `cluster declare`.
pub const CLUSTER_DECLARE: &str = "\
Example:
  shepherdctl cluster declare ams web.toml --reason 'the new front'

Nodes that have the role run it: shepherdctl cluster roles ams --add_role web.

web.toml:
  role = \"web\"

  [[service]]
  name = \"server\"
  program = \"/usr/bin/perl\"           # or artefact = SHA-256 and url = \"http://HOST/PATH\"
  arguments = [\"server.pl\", \"{{node.address}}\"]
  user = \"nobody\"
  limits = { memory = \"64MiB\", processors = 0.5, tasks = 20 }
  health = { http = { port = 8080, path = \"/\" }, interval = \"5s\" }

  [[service.file]]
  path = \"server.pl\"
  from = \"server.pl\"                  # a file beside this one, or contents = \"…\"

A service may also have environment, depends_on, restart (always, on-failure or never) and stop_time;
health may be tcp = PORT or exec = [PROGRAM, …]. Declared again, a role is replaced: each node
that has it restarts the services that changed. A declaration is no place for secrets.";

/// Examples in the help of `cluster undeclare`.
pub const CLUSTER_UNDECLARE: &str = "\
Example:
  shepherdctl cluster undeclare ams web --reason 'the front moved'

A role that workers are to have is not withdrawn; shepherdctl cluster roles ams --remove_role web comes first.";

/// Examples in the help of `cluster snapshot`.
pub const CLUSTER_SNAPSHOT: &str = "\
Example:
  shepherdctl cluster snapshot ams --reason 'before the new release'

One is taken every hour in any case, and when other machines are of the control plane than before.";

/// Examples in the help of `cluster rotate-key`.
pub const CLUSTER_ROTATE_KEY: &str = "\
Example:
  shepherdctl cluster rotate-key ams --reason 'a backup of the database is lost'

The curators take the next key before they refuse the one before, and every certificate for it. It is replaced every
thirty days in any case, or as --cluster_key_rotation_interval says. People's certificates stay as they
are.";

/// Examples in the help of `cluster snapshots`.
pub const CLUSTER_SNAPSHOTS: &str = "\
Example:
  shepherdctl cluster snapshots ams -o json | jq -r '.snapshots[0].id'

A snapshot is kept sealed in the database, and holds every secret of the cluster.";

/// Examples in the help of `cluster credentials issue`.
pub const CLUSTER_CREDENTIALS_ISSUE: &str = "\
Example:
  shepherdctl cluster credentials issue ams --output_dir ./ams --reason 'a look at its tickets'

The holder of the key has an owner's rights in the cluster, without a shepherd and its audit, until the
certificate ends. The key is made here and goes nowhere else.";

/// Examples in the help of `cluster credentials get`.
pub const CLUSTER_CREDENTIALS_GET: &str = "\
Example:
  shepherdctl cluster credentials get ams

What is over is shown for a day; what was revoked, as long as it would have been good.";

/// Examples in the help of `cluster credentials revoke`.
pub const CLUSTER_CREDENTIALS_REVOKE: &str = "\
Example:
  shepherdctl cluster credentials revoke ams 0199d0a2-4f5e-7cc1-9d52-5b1f0a1c2d3e --reason 'left'

The curators refuse it as soon as they receive the revocation, and again after a restore from a snapshot.";

/// Examples in the help of `cluster kubernetes set`.
pub const CLUSTER_KUBERNETES_SET: &str = "\
Examples:
  shepherdctl cluster kubernetes set ams --bundle 'kubernetes 1.30.1' --reason 'the first services'
  shepherdctl cluster kubernetes set ams --add_on dns=coredns.yaml --reason 'names for services'

A bundle and an add-on are artefacts: shepherdctl artefacts add. Another bundle than the one that a
cluster runs is an upgrade: shepherdctl cluster upgrade.";

/// Examples in the help of `cluster kubernetes remove`.
pub const CLUSTER_KUBERNETES_REMOVE: &str = "\
Example:
  shepherdctl cluster kubernetes remove ams --reason 'the trial is over'

Its workers stop pods, then its controllers end, and its authorities are forgotten. What Kubernetes kept in
etcd stays there.";

/// Examples in the help of `cluster kubernetes rotate`.
pub const CLUSTER_KUBERNETES_ROTATE: &str = "\
Example:
  shepherdctl cluster kubernetes rotate ams --keys clients --reason 'a laptop was stolen'

The new one is trusted everywhere before it signs, and the old one until what it signed has ended. How far it
is, and for which nodes it waits, shows: shepherdctl cluster describe.";

/// Examples in the help of `cluster kubeconfig`.
pub const CLUSTER_KUBECONFIG: &str = "\
Examples:
  shepherdctl cluster kubeconfig ams --output_file ams.yaml --reason 'a look'
  shepherdctl cluster kubeconfig ams --access viewer --output_file view.yaml --reason 'a board'

The key is made here and goes nowhere else. Kubernetes cannot revoke a certificate: the holder of
the file may use it until it ends, or until the authority of clients is replaced.";

/// Examples in the help of `cluster upgrade`.
pub const CLUSTER_UPGRADE: &str = "\
Examples:
  shepherdctl cluster upgrade ams --kubernetes_bundle 'kubernetes 1.31.0' --reason next --dry_run
  shepherdctl cluster upgrade ams --roleserver_release roleserver-1.5 --parallelism 3 --reason fix
  shepherdctl cluster upgrade ams --rollback --reason 'pods do not start'

The first node that is not well with the bundle in time pauses the upgrade: --resume orders it again,
--rollback goes back, --abort ends it where it is.";

/// Examples in the help of `cluster restore`.
pub const CLUSTER_RESTORE: &str = "\
Examples:
  shepherdctl cluster restore ams --reason 'two of its three members burnt'
  shepherdctl cluster restore ams --target_machine rack-7-03 --reason 'the rest of the hall is dark'

What was changed since the snapshot is lost. Workers go on with what they run, and follow the new
control plane. Machines of the old one leave; an unreachable one gets the order when it reports again.";

/// Examples in the help of `cluster approve`.
pub const CLUSTER_APPROVE: &str = "\
Example:
  shepherdctl cluster approve ams rack-7-03 --reason 'I compared the key on its console'

It lets in the key that the machine reports now over its agent channel, and no other one.";

/// Examples in the help of `cluster delete`.
pub const CLUSTER_DELETE: &str = "\
Example:
  shepherdctl cluster delete ams --reason 'the trial is over'

Its machines stay in the fleet. What runs on them for the cluster ends, and what they keep of it, its
etcd included, is removed.";

/// Examples in the help of `artefacts add`.
pub const ARTEFACTS_ADD: &str = "\
Examples:
  shepherdctl artefacts add ./server-1.4 --reason 'the new front'
  shepherdctl artefacts add roleserver --name 'roleserver 1.4' --reason 'the next release'

It is known by its digest, which is printed. A service of a role that names it without a URL fetches it
from a shepherd. Given again after it was cut off, it goes on where it ended.";

/// Examples in the help of `artefacts get`.
pub const ARTEFACTS_GET: &str = "\
Example:
  shepherdctl artefacts get -o json | jq -r '.artefacts[] | .sha256 + \" \" + .name'";

/// Examples in the help of `artefacts delete`.
pub const ARTEFACTS_DELETE: &str = "\
Example:
  shepherdctl artefacts delete server-1.3 --reason 'nothing is made of it any more'";

/// Examples in the help of `logs`.
pub const LOGS: &str = "\
Examples:
  shepherdctl logs sim-0007                     which logs there are
  shepherdctl logs sim-0007 roleserver --since 10m
  shepherdctl logs sim-0007 web/server --lines 1000 --follow
  shepherdctl logs sim-0007 etcd -o json | jq -r '.lines[]'

The machine gets the request with the answer to its next heartbeat, and sends the log itself; nobody
connects to it. A silent machine gets no request. The audit records who requested which log.";

/// Examples in the help of `why`.
pub const WHY: &str = "\
Examples:
  shepherdctl why sim-0007
  shepherdctl why rack-a/sim-0007 --context prod";

/// Examples in the help of `timeline`.
pub const TIMELINE: &str = "\
Example:
  shepherdctl timeline sim-0007 --limit 20";

/// Examples in the help of `describe machine`.
pub const DESCRIBE_MACHINE: &str = "\
Example:
  shepherdctl describe machine sim-0007 -o yaml";

/// Examples in the help of `plan`.
pub const PLAN: &str = "\
Examples:
  shepherdctl plan --machine sim-0007           what happens to it; if nothing does, why
  shepherdctl plan --process Recovery --horizon 10m
  shepherdctl plan --diff new.toml              what the policy in that file would change";

/// Examples in the help of `issues`.
pub const ISSUES: &str = "\
Example:
  shepherdctl issues -o json | jq -r '.issues[] | select(.severity == \"critical\") | .subject'";

/// Examples in the help of `top`.
pub const TOP: &str = "\
Examples:
  shepherdctl top
  shepherdctl top --interval 10s
  shepherdctl top --once -o json | jq '.phases[] | select(.over_deadline > 0)'";

/// Examples in the help of `watch`.
pub const WATCH: &str = "\
Examples:
  shepherdctl watch --phase NeedsHuman --phase Quarantined
  shepherdctl watch --provider rack-a -o json | jq -c '[.event, .provider_id, .phase]'";

/// Examples in the help of `policy get`.
pub const POLICY_GET: &str = "\
Example:
  shepherdctl policy get -o json | jq .policy.ladder";

/// Examples in the help of `hold`.
pub const HOLD: &str = "\
Examples:
  shepherdctl hold sim-0007 --reason 'changing a disk' --until 2h
  shepherdctl hold sim-0007 --reason 'its console is in use' --scope power
  shepherdctl hold --label row=7 --reason 'the row is rewired' --until 4h

An order about many machines lists them first, and asks for their number or takes it from --confirm_count.";

/// Examples in the help of `release`.
pub const RELEASE: &str = "\
Examples:
  shepherdctl release sim-0007 --reason 'the disk is changed'
  shepherdctl release sim-0007 --quarantine
  shepherdctl release --label row=7 --confirm_count 24 --reason 'the row is rewired'";

/// Examples in the help of `retry`.
pub const RETRY: &str = "\
Example:
  shepherdctl retry sim-0007 --reason 'plugged in again'";

/// Examples in the help of `quarantine`.
pub const QUARANTINE: &str = "\
Examples:
  shepherdctl quarantine sim-0007 --reason 'its fan rattles'
  shepherdctl quarantine --provider rack-a --fact needs_human --reason 'for the vendor'";

/// Examples in the help of `label`.
pub const LABEL: &str = "\
Examples:
  shepherdctl label sim-0007 --set row=7 --set owner=kim
  shepherdctl label --provider rack-a --set site=north --confirm_count 40";

/// Examples in the help of `unlabel`.
pub const UNLABEL: &str = "\
Example:
  shepherdctl unlabel sim-0007 --key owner";

/// Examples in the help of `prioritize`.
pub const PRIORITIZE: &str = "\
Examples:
  shepherdctl prioritize sim-0007 urgent --reason 'a customer waits' --until 4h
  shepherdctl prioritize --label row=7 low --reason 'the row is spare'
  shepherdctl prioritize sim-0007 normal --reason 'the customer has it'

Due work is taken by class, with the weights of the policy (priority_weights): urgent, normal, low.
What a person says counts before the engine's own yielding of machines that fail again and again.";

/// Examples in the help of `loops pause`.
pub const LOOPS_PAUSE: &str = "\
Examples:
  shepherdctl loops pause recoverer --provider rack-a --reason 'its switch is changed' --until 2h
  shepherdctl loops pause provisioner --reason 'no more machines before the audit'

A paused loop claims no machine, and a paused provisioner makes no pass. Every shepherd heeds it within
seconds, and after a restart as well. `why` of a machine that waits for it says so.";

/// Examples in the help of `loops resume`.
pub const LOOPS_RESUME: &str = "\
Example:
  shepherdctl loops resume recoverer --provider rack-a --reason 'the switch is in'";

/// Examples in the help of `update`.
pub const UPDATE: &str = "\
Examples:
  shepherdctl update --selector label.row=7 --release 'roleserver 1.4' --reason 'a try' --dry_run
  shepherdctl update --selector '' --release 'roleserver 1.4' --parallelism 5 --reason '1.4'

The release is an artefact (shepherdctl artefacts add). Each machine fetches it, switches to it without
ending what runs beside its role server, and goes back by itself if it reaches no shepherd. The next
machine gets the order when those before run it and are well; the first failure pauses the update.";

/// Examples in the help of `update get`.
pub const UPDATE_GET: &str = "\
Example:
  shepherdctl update get -o json | jq -r '.updates[] | select(.pause_reason != null) | .id'";

/// Examples in the help of `update describe`.
pub const UPDATE_DESCRIBE: &str = "\
Example:
  shepherdctl update describe 3f9a12bc          its machines, and what each waits for";

/// Examples in the help of `update pause`.
pub const UPDATE_PAUSE: &str = "\
Example:
  shepherdctl update pause 3f9a12bc --reason 'the row is looked at first'";

/// Examples in the help of `update resume`.
pub const UPDATE_RESUME: &str = "\
Example:
  shepherdctl update resume 3f9a12bc --reason 'its disk was full, and is not any more'

Machines that failed stay as they are; another update may order them again.";

/// Examples in the help of `update abort`.
pub const UPDATE_ABORT: &str = "\
Example:
  shepherdctl update abort 3f9a12bc --reason 'the release is bad'";

/// Examples in the help of `retire`.
pub const RETIRE: &str = "\
Examples:
  shepherdctl retire sim-0007 --reason 'its lease ends'
  shepherdctl retire --label row=7 --reason 'the row is sold' --dry_run
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'
  shepherdctl retire waive sim-0007 release --confirm 'sim/sim-0007 is not known to be given back' --reason 'the provider is gone'";

/// Examples in the help of `reboot`.
pub const REBOOT: &str = "\
Examples:
  shepherdctl reboot sim-0007 --reason 'a new kernel'
  shepherdctl reboot --label row=7 --reason 'a new kernel' --dry_run
  shepherdctl why sim-0007";

/// Examples in the help of `power`.
pub const POWER: &str = "\
Examples:
  shepherdctl power off sim-0007 --reason 'its fan is replaced'
  shepherdctl power on sim-0007 --reason 'the fan is in' && shepherdctl release sim-0007
  shepherdctl power cycle --provider rack-a --phase NeedsHuman --reason 'the switch is back' --dry_run
  shepherdctl power cancel sim-0007";

/// Examples in the help of `power cancel`.
pub const POWER_CANCEL: &str = "\
Example:
  shepherdctl power cancel sim-0007 --reason 'it came back'";

/// Examples in the help of `retire cancel`.
pub const RETIRE_CANCEL: &str = "\
Example:
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'";

/// Examples in the help of `retire waive`.
pub const RETIRE_WAIVE: &str = "\
Examples:
  shepherdctl retire waive sim-0007 wipe --confirm 'sim/sim-0007 is not wiped' --reason 'its disks are shredded'
  shepherdctl retire waive sim-0007 release --confirm 'sim/sim-0007 is not known to be given back' --reason 'the provider is gone'";

/// Examples in the help of `debug bundle`.
pub const DEBUG_BUNDLE: &str = "\
Examples:
  shepherdctl debug bundle
  shepherdctl debug bundle --direct --machine sim-0007 --output_file /tmp/for-help.tar.gz

It has what the commands that read answer, as JSON: issues, machines, providers, sessions, work, loops, plan, policy; and
why, facts and history of each machine that has an issue or is named. Passwords, tokens and keys in known forms are masked;
read it before you send it.";

/// Examples in the help of `allow host-key`.
pub const ALLOW_HOST_KEY: &str = "\
Example:
  shepherdctl allow host-key sim-0007 --fingerprint SHA256:3h5p… --reason 'it was reinstalled'";

/// Examples in the help of `tokens bootstrap`.
pub const TOKENS_BOOTSTRAP: &str = "\
Examples:
  shepherdctl tokens bootstrap --direct --save_context prod
  shepherdctl tokens bootstrap --direct --output_file /root/token";

/// Examples in the help of `tokens create`.
pub const TOKENS_CREATE: &str = "\
Examples:
  shepherdctl tokens create lee --role operator --provider rack-a --reason 'lee runs rack a'
  shepherdctl tokens create ci --role viewer --certificate ci.pem --reason 'the pipeline looks'";

/// Examples in the help of `tokens get`.
pub const TOKENS_GET: &str = "\
Example:
  shepherdctl tokens get -o json | jq -r '.credentials[] | select(.active) | .name'";

/// Examples in the help of `tokens revoke`.
pub const TOKENS_REVOKE: &str = "\
Example:
  shepherdctl tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10 --reason 'lee left'";
