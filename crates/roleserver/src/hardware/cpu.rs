//! Processors from `/proc/cpuinfo` and sysfs topology.
//!
//! There is one entry for each physical package. `/proc/cpuinfo` has the names, sysfs shows which threads share a core
//! and which cores share a package. A kernel without topology has only the ids of `/proc/cpuinfo`, and arm64 has none
//! there at all.

use std::collections::{BTreeMap, BTreeSet};

use proto::hardware::v1 as wire;
use proto::hardware::v1::cpu::{Architecture, Arm, X86};

use crate::hardware::{Sources, Warnings, read_text, truncate_text};

/// Reads all packages, sorted by id.
pub fn read_cpus(sources: &Sources, warnings: &mut Warnings) -> Vec<wire::Cpu> {
    let cpuinfo = warnings.read_required_text(&sources.proc.join("cpuinfo"));
    let threads = parse_cpuinfo(&cpuinfo);
    if threads.is_empty() {
        warnings.add_warning("/proc/cpuinfo names no processor");
    }
    let mut packages: BTreeMap<i64, (Thread<'_>, BTreeSet<String>, u32)> = BTreeMap::new();
    for thread in threads {
        let topology = sources.sys.join(format!("devices/system/cpu/cpu{}/topology", thread.number));
        let package = read_text(&topology.join("physical_package_id")).and_then(|id| id.parse().ok());
        // arm64 firmware without a topology leaves -1.
        let package = package.filter(|id| *id >= 0).or(thread.package).unwrap_or(0);
        // A core's id repeats in each die, the list of its threads does not.
        let core = read_text(&topology.join("core_cpus_list"))
            .or_else(|| read_text(&topology.join("thread_siblings_list")))
            .or_else(|| thread.core.map(str::to_owned))
            .unwrap_or_else(|| thread.number.to_string());
        let entry = packages.entry(package).or_insert_with(|| (thread, BTreeSet::new(), 0));
        entry.1.insert(core);
        entry.2 += 1;
    }
    packages
        .into_values()
        .map(|(thread, cores, threads)| describe_cpu(&thread, cores.len(), threads))
        .collect()
}

fn describe_cpu(thread: &Thread<'_>, cores: usize, threads: u32) -> wire::Cpu {
    let cores = u32::try_from(cores).unwrap_or(u32::MAX);
    let field = |name: &str| thread.fields.get(name).copied();
    let (vendor, model, architecture) = if let Some(implementer) = field("CPU implementer") {
        let arm = Arm {
            implementer: parse_hexadecimal(implementer),
            part: field("CPU part").map_or(0, parse_hexadecimal),
            variant: field("CPU variant").map_or(0, parse_hexadecimal),
            revision: field("CPU revision").and_then(|text| text.parse().ok()).unwrap_or(0),
        };
        let model = field("model name").map_or_else(|| format!("part {:#x}", arm.part), truncate_text);
        (arm_vendor(arm.implementer), model, Some(Architecture::Arm64(arm)))
    } else {
        let decimal = |name| field(name).and_then(|text| text.parse().ok());
        let architecture = decimal("cpu family").zip(decimal("model")).map(|(family, model)| {
            Architecture::X8664(X86 { family, model, stepping: decimal("stepping").unwrap_or(0) })
        });
        let text = |name| field(name).map(truncate_text).unwrap_or_default();
        (text("vendor_id"), text("model name"), architecture)
    };
    wire::Cpu { vendor, model, cores, threads, architecture }
}

/// Names of implementers (Arm Architecture Reference Manual, `MIDR_EL1`).
fn arm_vendor(implementer: u32) -> String {
    match implementer {
        0x41 => "ARM",
        0x42 => "Broadcom",
        0x43 => "Cavium",
        0x46 => "Fujitsu",
        0x48 => "HiSilicon",
        0x4e => "NVIDIA",
        0x50 => "Applied Micro",
        0x51 => "Qualcomm",
        0x53 => "Samsung",
        0x56 => "Marvell",
        0x61 => "Apple",
        0x69 => "Intel",
        0x6d => "Microsoft",
        0x70 => "Phytium",
        0xc0 => "Ampere",
        other => return format!("implementer {other:#x}"),
    }
    .to_owned()
}

fn parse_hexadecimal(text: &str) -> u32 {
    u32::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0)
}

struct Thread<'a> {
    number: u32,
    package: Option<i64>,
    core: Option<&'a str>,
    fields: BTreeMap<&'a str, &'a str>,
}

fn parse_cpuinfo(cpuinfo: &str) -> Vec<Thread<'_>> {
    fn block(block: &str) -> Option<Thread<'_>> {
        let fields: BTreeMap<_, _> = block
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.trim(), value.trim()))
            .collect();
        Some(Thread {
            number: fields.get("processor")?.parse().ok()?,
            package: fields.get("physical id").and_then(|id| id.parse().ok()),
            core: fields.get("core id").copied(),
            fields,
        })
    }
    cpuinfo.split("\n\n").filter_map(block).collect()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::*;

    fn machine(cpuinfo: &str, topology: &[(u32, &str, &str)]) -> Vec<wire::Cpu> {
        let root = tempfile::tempdir().unwrap();
        let sources = Sources::in_directory(root.path());
        std::fs::create_dir_all(&sources.proc).unwrap();
        std::fs::write(sources.proc.join("cpuinfo"), cpuinfo).unwrap();
        for (number, package, siblings) in topology {
            let directory = sources.sys.join(format!("devices/system/cpu/cpu{number}/topology"));
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("physical_package_id"), package).unwrap();
            std::fs::write(directory.join("core_cpus_list"), siblings).unwrap();
        }
        read_cpus(&sources, &mut Warnings::default())
    }

    fn xeon(packages: u32, cores: u32) -> String {
        let mut text = String::new();
        for thread in 0..packages * cores * 2 {
            let (package, core) = (thread / cores % packages, thread % cores);
            let _ = write!(
                text,
                "processor\t: {thread}\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 106\n\
                 model name\t: Intel(R) Xeon(R) Gold 6330 CPU @ 2.00GHz\nstepping\t: 6\n\
                 physical id\t: {package}\ncore id\t\t: {core}\n\n"
            );
        }
        text
    }

    #[test]
    fn two_sockets_with_hyperthreads_are_two_processors() {
        let cpus = machine(&xeon(2, 28), &[]);
        assert_eq!(cpus.len(), 2);
        for cpu in cpus {
            assert_eq!((cpu.cores, cpu.threads), (28, 56));
            assert_eq!(cpu.vendor, "GenuineIntel");
            assert!(cpu.model.starts_with("Intel(R) Xeon(R) Gold 6330"));
            let x86 = X86 { family: 6, model: 106, stepping: 6 };
            assert_eq!(cpu.architecture, Some(Architecture::X8664(x86)));
        }
    }

    #[test]
    fn arm_packages_come_from_sysfs() {
        let block = "BogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n\
                     CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n";
        let cpuinfo: String = ["0", "1", "2", "3"].map(|n| format!("processor\t: {n}\n{block}")).concat();
        let cpus = machine(&cpuinfo, &[(0, "0", "0"), (1, "0", "1"), (2, "1", "2"), (3, "1", "3")]);
        assert_eq!(cpus.len(), 2);
        assert_eq!((cpus[0].cores, cpus[0].threads), (2, 2));
        assert_eq!((cpus[0].vendor.as_str(), cpus[0].model.as_str()), ("ARM", "part 0xd0c"));
        let arm = Arm { implementer: 0x41, part: 0xd0c, variant: 3, revision: 1 };
        assert_eq!(cpus[0].architecture, Some(Architecture::Arm64(arm)));
        let unknown = machine(&cpuinfo, &[(0, "-1", "0"), (1, "-1", "1"), (2, "-1", "2"), (3, "-1", "3")]);
        assert_eq!((unknown.len(), unknown[0].cores), (1, 4));
    }
}
