//! Reads how much memory this process may use: the limits of its cgroup, which a container or a service manager sets.

use std::fs;
use std::path::Path;

/// Values from this one on stand for no limit: version 1 of cgroups has no word for that.
const NO_LIMIT: u64 = 1 << 62;

/// Returns the lowest memory limit, in bytes, among the cgroup of this process and all cgroups that contain it. `root`
/// is the folder that contains `proc` and `sys`.
pub(crate) fn memory_limit(root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    groups.lines().filter_map(|line| limit_of(root, line)).min()
}

/// Returns the limit for a line of `/proc/self/cgroup`, such as `0::/a/b` or, in version 1, `4:memory:/a/b`.
fn limit_of(root: &Path, line: &str) -> Option<u64> {
    let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
    let (folder, file) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return None,
    };
    // In a container the path may be that of the host, although the container sees its own cgroup as the root. Folders
    // that do not exist have no limit.
    let limit = |group: &Path| -> Option<u64> {
        let text = fs::read_to_string(root.join(folder).join(group).join(file)).ok()?;
        text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT)
    };
    Path::new(path.trim_start_matches('/')).ancestors().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the limit of a process with these lines in `/proc/self/cgroup`, and these files under `/sys/fs/cgroup`.
    fn limit(groups: &str, files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let files = files.iter().map(|(path, text)| (format!("sys/fs/cgroup/{path}"), *text));
        for (path, text) in files.chain([(String::from("proc/self/cgroup"), groups)]) {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        memory_limit(root.path())
    }

    #[test]
    fn version_2_has_the_lowest_limit_of_the_group_and_its_parents() {
        let groups = "0::/kubepods/pod1/container\n";
        let (own, parent) = ("kubepods/pod1/container/memory.max", "kubepods/pod1/memory.max");
        assert_eq!(limit(groups, &[(own, "104857600\n")]), Some(104_857_600));
        assert_eq!(limit(groups, &[(own, "104857600\n"), (parent, "max\n")]), Some(104_857_600));
        assert_eq!(limit(groups, &[(own, "104857600\n"), (parent, "52428800\n")]), Some(52_428_800));
        assert_eq!(limit(groups, &[(own, "max\n"), (parent, "52428800\n")]), Some(52_428_800));
        assert_eq!(limit(groups, &[(own, "max\n"), (parent, "max\n")]), None);
        assert_eq!(limit("0::/\n", &[("memory.max", "104857600\n")]), Some(104_857_600));
    }

    #[test]
    fn version_1_has_a_line_for_each_controller() {
        let groups = "11:cpu,cpuacct:/docker/a\n4:hugetlb,memory:/docker/a\n1:name=systemd:/docker/a\n0::/\n";
        let (own, parent) = ("memory/docker/a/memory.limit_in_bytes", "memory/docker/memory.limit_in_bytes");
        assert_eq!(limit(groups, &[(own, "104857600\n")]), Some(104_857_600));
        assert_eq!(limit(groups, &[(own, "104857600\n"), (parent, "52428800\n")]), Some(52_428_800));
        assert_eq!(limit(groups, &[(own, "9223372036854771712\n")]), None, "that is how version 1 says none");
        let elsewhere = [("cpu/docker/a/memory.limit_in_bytes", "1\n"), ("memory.limit_in_bytes", "1\n")];
        assert_eq!(limit(groups, &elsewhere), None);
    }

    #[test]
    fn a_container_that_sees_its_own_group_as_the_root_has_that_limit() {
        for (groups, path) in [
            ("4:memory:/docker/0123456789ab\n", "memory/memory.limit_in_bytes"),
            ("0::/system.slice/docker-0123456789ab.scope\n", "memory.max"),
        ] {
            assert_eq!(limit(groups, &[(path, "104857600\n")]), Some(104_857_600), "{groups}");
        }
    }

    #[test]
    fn without_cgroups_or_with_wrong_lines_there_is_no_limit() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(memory_limit(root.path()), None);
        for groups in ["", "\n", "0\n", "0::\n", "memory:/a\n"] {
            assert_eq!(limit(groups, &[("a/memory.max", "1\n")]), None, "{groups:?}");
        }
        assert_eq!(limit("0::/a\n", &[("a/memory.max", "much\n")]), None);
    }
}
