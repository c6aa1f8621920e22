//! Examples at the end of a command's help. Whatever goes through a context's API has one.

/// `get machines`.
pub const GET_MACHINES: &str = "\
Examples:
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl get machines --provider rack-a --limit 1000 -o json";

/// `get sessions`.
pub const GET_SESSIONS: &str = "\
Example:
  shepherdctl get sessions --context prod";

/// `get work`.
pub const GET_WORK: &str = "\
Example:
  shepherdctl get work --limit 20";

/// `get providers`.
pub const GET_PROVIDERS: &str = "\
Example:
  shepherdctl get providers -o yaml";

/// `why`.
pub const WHY: &str = "\
Examples:
  shepherdctl why sim-0007
  shepherdctl why rack-a/sim-0007 --context prod";

/// `timeline`.
pub const TIMELINE: &str = "\
Example:
  shepherdctl timeline sim-0007 --limit 20";

/// `hold`.
pub const HOLD: &str = "\
Examples:
  shepherdctl hold sim-0007 --reason 'changing a disk' --until 2h
  shepherdctl hold sim-0007 --reason 'its console is in use' --scope power";

/// `release`.
pub const RELEASE: &str = "\
Examples:
  shepherdctl release sim-0007 --reason 'the disk is changed'
  shepherdctl release sim-0007 --quarantine";

/// `retry`.
pub const RETRY: &str = "\
Example:
  shepherdctl retry sim-0007 --reason 'plugged in again'";

/// `retire`.
pub const RETIRE: &str = "\
Examples:
  shepherdctl retire sim-0007 --reason 'its lease ends'
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'
  shepherdctl retire waive sim-0007 release --i_know 'sim/sim-0007 is not given back' --reason 'the provider is gone'";

/// `retire cancel`.
pub const RETIRE_CANCEL: &str = "\
Example:
  shepherdctl retire cancel sim-0007 --reason 'it is needed after all'";

/// `retire waive`.
pub const RETIRE_WAIVE: &str = "\
Examples:
  shepherdctl retire waive sim-0007 wipe --i_know 'sim/sim-0007 is not wiped' --reason 'its disks are shredded'
  shepherdctl retire waive sim-0007 release --i_know 'sim/sim-0007 is not given back' --reason 'the provider is gone'";

/// `allow host-key`.
pub const ALLOW_HOST_KEY: &str = "\
Example:
  shepherdctl allow host-key sim-0007 --fingerprint SHA256:3h5p… --reason 'it was installed anew'";

/// `tokens bootstrap`.
pub const TOKENS_BOOTSTRAP: &str = "\
Examples:
  shepherdctl tokens bootstrap --direct --save_context prod
  shepherdctl tokens bootstrap --direct --output_file /root/token";

/// `tokens create`.
pub const TOKENS_CREATE: &str = "\
Examples:
  shepherdctl tokens create lee --role operator --provider rack-a --reason 'lee runs rack a'
  shepherdctl tokens create ci --role viewer --certificate ci.pem --reason 'the pipeline looks'";

/// `tokens get`.
pub const TOKENS_GET: &str = "\
Example:
  shepherdctl tokens get -o json | jq -r '.credentials[] | select(.active) | .name'";

/// `tokens revoke`.
pub const TOKENS_REVOKE: &str = "\
Example:
  shepherdctl tokens revoke 0199f3a2-5c1d-7e60-8000-3f2a9b7c4d10 --reason 'lee left'";
