//! The filter of system calls (seccomp) of a service in a root filesystem, in the form of an OCI configuration.
//!
//! It permits what containerd's default profile permits: what is not listed fails with EPERM. Some calls are permitted only
//! with a capability, some only on one architecture. The profile is data of the kernel's interface, so a newer kernel may
//! need an entry here: a program that gets EPERM for a call that it needs works with `seccomp = "unconfined"` in its
//! declaration until then.
//!
//! The source of record is `contrib/seccomp/seccomp_default.go` of the containerd release that the tests here name. They
//! compare the filter with the digest of that profile, and `tools/seccomp-profile` compares the digest with the file.
//!
//! runc skips names that its libseccomp does not know. The numbers are those of Linux (`linux/sched.h`, `linux/socket.h`,
//! `linux/personality.h`).

use serde_json::{Value, json};

/// Permitted for every service.
const PERMITTED: &str = "\
    accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir chmod chown chown32 \
    clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64 \
    clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup dup2 dup3 \
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old \
    eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate \
    fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync \
    fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync \
    ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake futimesat \
    get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 \
    getgid getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority \
    getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt \
    gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1 \
    inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit \
    ioctl ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self \
    lchown lchown32 lgetxattr link linkat listen listmount listxattr listxattrat llistxattr _llseek \
    lremovexattr lseek lsetxattr lsm_get_self_attr lsm_list_modules lsm_set_self_attr lstat lstat64 madvise \
    map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 \
    mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedreceive_time64 \
    mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock \
    munlockall munmap name_to_handle_at nanosleep newfstatat _newselect open openat openat2 pause pidfd_open \
    pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 \
    preadv preadv2 prlimit64 process_mrelease pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read \
    readahead readlink readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages \
    removexattr removexattrat rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction \
    rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait \
    rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity \
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 \
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl \
    semget semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto \
    set_robust_list set_thread_area set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 \
    setgroups setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid \
    setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32 setxattr setxattrat shmat \
    shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4 sigprocmask sigreturn socketcall socketpair \
    splice stat stat64 statfs statfs64 statmount statx symlink symlinkat sync sync_file_range syncfs sysinfo \
    tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime \
    timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime timerfd_settime64 times \
    tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat uretprobe utime utimensat \
    utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev";

/// Permitted besides with a capability, by its name with `CAP_`.
const PERMITTED_WITH: &[(&str, &str)] = &[
    ("CAP_BPF", "bpf"),
    ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    ("CAP_PERFMON", "perf_event_open"),
    (
        "CAP_SYS_ADMIN",
        "bpf clone clone3 fanotify_init fsconfig fsmount fsopen fspick lookup_dcookie mount mount_setattr move_mount \
         open_tree perf_event_open quotactl quotactl_fd setdomainname sethostname setns syslog umount umount2 unshare",
    ),
    ("CAP_SYS_BOOT", "reboot"),
    ("CAP_SYS_CHROOT", "chroot"),
    ("CAP_SYS_MODULE", "delete_module finit_module init_module"),
    ("CAP_SYS_NICE", "get_mempolicy mbind set_mempolicy set_mempolicy_home_node"),
    ("CAP_SYS_PACCT", "acct"),
    ("CAP_SYS_PTRACE", "kcmp pidfd_getfd process_madvise process_vm_readv process_vm_writev ptrace"),
    ("CAP_SYS_RAWIO", "ioperm iopl"),
    ("CAP_SYS_TIME", "clock_settime clock_settime64 settimeofday stime"),
    ("CAP_SYS_TTY_CONFIG", "vhangup"),
    ("CAP_SYSLOG", "syslog"),
];

/// The kernel checks these calls itself since 4.8: they reach no process that the caller could not trace.
const TRACING: &str = "process_vm_readv process_vm_writev ptrace";

/// `personality` of these values: the default, 32 bits, and an emulated version of the kernel; the last one is a query.
const PERSONALITIES: [u32; 5] = [0, 0x0008, 0x2_0000, 0x2_0008, 0xffff_ffff];
/// Encryption in the kernel, and sockets to the hypervisor: permitted for no service. `socketcall`, by which programs of 32
/// bits may make sockets, is not filtered by them, because its arguments are in memory that a filter cannot see.
const AF_ALG: u32 = 38;
const AF_VSOCK: u32 = 40;
/// The flags by which `clone` would make namespaces: mount, cgroup, UTS, IPC, user, pid, network.
const NAMESPACES: u32 =
    0x0002_0000 | 0x0200_0000 | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000;
/// "No such system call": programs then use `clone`, and a filter can see its flags.
const ENOSYS: u32 = 38;

/// The system calls of one architecture: its names for runc, itself and those that its kernel runs besides, and calls that
/// only it has.
fn architecture(name: &str) -> (&'static [&'static str], &'static str) {
    match name {
        "x86_64" => (&["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"], "arch_prctl modify_ldt"),
        "aarch64" => (
            &["SCMP_ARCH_ARM", "SCMP_ARCH_AARCH64"],
            "arm_fadvise64_64 arm_sync_file_range breakpoint cacheflush set_tls sync_file_range2",
        ),
        "riscv64" => (&["SCMP_ARCH_RISCV64"], "riscv_flush_icache riscv_hwprobe"),
        // runc takes its own then.
        _ => (&[], ""),
    }
}

/// The filter for a service with these capabilities in its bounding set, by their names with `CAP_`, on a machine of this
/// architecture, by its name in Rust (`std::env::consts::ARCH`).
#[must_use]
pub fn seccomp_filter(machine: &str, capabilities: &[String]) -> Value {
    let (architectures, own_calls) = architecture(machine);
    let permit = |names: &str| {
        let names: Vec<&str> = names.split_whitespace().collect();
        json!({ "names": names, "action": "SCMP_ACT_ALLOW" })
    };
    let permit_value = |name: &str, operation: &str, value: u32| {
        json!({
            "names": [name],
            "action": "SCMP_ACT_ALLOW",
            "args": [{ "index": 0, "value": value, "valueTwo": 0, "op": operation }],
        })
    };
    let mut rules = vec![permit(PERMITTED), permit(TRACING)];
    if !own_calls.is_empty() {
        rules.push(permit(own_calls));
    }
    // One rule for each range: runc takes several conditions about one argument for alternatives.
    rules.push(permit_value("socket", "SCMP_CMP_LT", AF_ALG));
    rules.push(permit_value("socket", "SCMP_CMP_EQ", AF_ALG + 1));
    rules.push(permit_value("socket", "SCMP_CMP_GT", AF_VSOCK));
    rules.extend(PERSONALITIES.map(|value| permit_value("personality", "SCMP_CMP_EQ", value)));
    let has = |capability: &str| capabilities.iter().any(|name| name == capability);
    rules.extend(
        PERMITTED_WITH.iter().filter(|(capability, _)| has(capability)).map(|(_, names)| permit(names)),
    );
    if !has("CAP_SYS_ADMIN") {
        // No flag of NAMESPACES may be set.
        rules.push(permit_value("clone", "SCMP_CMP_MASKED_EQ", NAMESPACES));
        rules.push(json!({ "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS }));
    }
    json!({ "defaultAction": "SCMP_ACT_ERRNO", "architectures": architectures, "syscalls": rules })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ring::digest;

    use super::*;

    // `tools/seccomp-profile` reads these three.
    /// The release of containerd with this profile.
    const CONTAINERD_RELEASE: &str = "v2.3.4";
    /// SHA-256 of its file.
    const SOURCE_SHA256: &str = "8b012c0982cf367e3c9e2b353f5fec1b6a22952d2a37edba1c18c7678feb2650";
    /// SHA-256 of the profile, as [`profile_lines`] writes it.
    const PROFILE_SHA256: &str = "e0659a2773ef78d35a6c20acd67643520b49293b5e9514041df4672217670e70";

    /// The arguments of a rule, `-` without any.
    fn format_arguments(rule: &Value) -> String {
        let Some(arguments) = rule.get("args").and_then(Value::as_array) else { return "-".to_owned() };
        let number = |argument: &Value, key: &str| argument[key].as_u64().unwrap();
        let arguments: Vec<String> = arguments
            .iter()
            .map(|argument| {
                let (index, operation) = (number(argument, "index"), argument["op"].as_str().unwrap());
                let (value, second) = (number(argument, "value"), number(argument, "valueTwo"));
                format!("{index}:{operation}:{value}:{second}")
            })
            .collect();
        arguments.join(",")
    }

    /// A line for each rule, on each architecture of role servers, without a capability and with each one. The order of rules
    /// and of names does not count.
    fn profile_lines() -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        let capabilities: Vec<&str> =
            std::iter::once("-").chain(PERMITTED_WITH.iter().map(|(capability, _)| *capability)).collect();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        for machine in ["x86_64", "aarch64", "riscv64"] {
            for capability in &capabilities {
                let filter = seccomp_filter(machine, &[(*capability).to_owned()]);
                let start = format!("{machine} {capability}");
                let architectures: Vec<String> =
                    filter["architectures"].as_array().unwrap().iter().map(text).collect();
                lines.insert(format!("{start} architectures {}", architectures.join(",")));
                lines.insert(format!("{start} default {}", text(&filter["defaultAction"])));
                for rule in filter["syscalls"].as_array().unwrap() {
                    let (action, arguments) = (text(&rule["action"]), format_arguments(rule));
                    let error = rule.get("errnoRet").map_or_else(|| "-".to_owned(), ToString::to_string);
                    for name in rule["names"].as_array().unwrap() {
                        lines.insert(format!("{start} {} {action} {error} {arguments}", text(name)));
                    }
                }
            }
        }
        lines
    }

    #[test]
    fn filter_is_the_profile_of_the_named_containerd() {
        let lines: String = profile_lines().into_iter().map(|line| line + "\n").collect();
        let digest = hex::encode(digest::digest(&digest::SHA256, lines.as_bytes()));
        assert_eq!(
            digest, PROFILE_SHA256,
            "the filter differs from the profile of containerd {CONTAINERD_RELEASE}, with the SHA-256 {SOURCE_SHA256} of its \
             file: compare it with `tools/seccomp-profile --lines FILE`"
        );
    }

    /// The names that the filter permits with any arguments.
    fn permitted(filter: &Value) -> BTreeSet<String> {
        let rules = filter["syscalls"].as_array().unwrap().iter();
        let plain = rules.filter(|rule| rule["action"] == "SCMP_ACT_ALLOW" && rule.get("args").is_none());
        plain
            .flat_map(|rule| rule["names"].as_array().unwrap())
            .map(|name| name.as_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn calls_that_change_the_host_need_their_capability() {
        let filter = |capabilities: &[&str]| {
            let named: Vec<String> = capabilities.iter().map(|&name| name.to_owned()).collect();
            permitted(&seccomp_filter("x86_64", &named))
        };
        let plain = filter(&["CAP_CHOWN", "CAP_NET_RAW"]);
        for call in ["read", "openat", "execve", "futex", "epoll_pwait2", "statx", "arch_prctl", "rseq"] {
            assert!(plain.contains(call), "{call}");
        }
        let closed = [
            "mount",
            "umount2",
            "unshare",
            "setns",
            "bpf",
            "keyctl",
            "add_key",
            "kexec_load",
            "init_module",
            "reboot",
            "swapon",
            "clock_settime",
            "open_by_handle_at",
            "perf_event_open",
            "userfaultfd",
            "clone",
            "clone3",
            "socket",
            "personality",
            "io_uring_setup",
            "ptrace_nothing",
            "chroot",
        ];
        for call in closed {
            assert!(!plain.contains(call), "{call}");
        }
        for (capability, call) in [
            ("CAP_SYS_ADMIN", "mount"),
            ("CAP_SYS_ADMIN", "clone3"),
            ("CAP_SYS_BOOT", "reboot"),
            ("CAP_SYS_CHROOT", "chroot"),
            ("CAP_SYS_TIME", "clock_settime"),
        ] {
            assert!(filter(&[capability]).contains(call), "{capability}");
        }
    }

    #[test]
    fn arguments_decide_about_namespaces_sockets_and_personalities() {
        let filter = seccomp_filter("x86_64", &[]);
        let rules = filter["syscalls"].as_array().unwrap();
        let of = |name: &str| -> Vec<&Value> {
            rules.iter().filter(|rule| rule["names"] == json!([name])).collect()
        };
        assert_eq!(
            of("clone")[0]["args"],
            json!([{ "index": 0, "value": 2_114_060_288, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ" }])
        );
        // Otherwise a thread could not be started: libraries try clone3 first, and go on to clone only after ENOSYS.
        assert_eq!(
            of("clone3"),
            [&json!({ "names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38 })]
        );
        assert_eq!((of("socket").len(), of("personality").len()), (3, 5));
        assert_eq!(filter["defaultAction"], "SCMP_ACT_ERRNO");
    }

    #[test]
    fn each_architecture_has_its_own_calls() {
        for (machine, name, call, other) in [
            ("x86_64", "SCMP_ARCH_X86_64", "arch_prctl", "cacheflush"),
            ("aarch64", "SCMP_ARCH_AARCH64", "cacheflush", "arch_prctl"),
        ] {
            let filter = seccomp_filter(machine, &[]);
            assert!(filter["architectures"].as_array().unwrap().contains(&json!(name)), "{machine}");
            let permitted = permitted(&filter);
            assert!(permitted.contains(call) && !permitted.contains(other), "{machine}");
        }
    }
}
