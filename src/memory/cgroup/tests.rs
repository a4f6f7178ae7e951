//! Tables of what kernels and container runtimes write.

use super::*;

const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";

fn group(folder: &str, version: Version) -> Group {
    Group { folder: folder.into(), version }
}

#[test]
fn finds_the_groups_of_a_process() {
    let v1_mounts = "24 1 8:1 / / rw - ext4 /dev/root rw\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
        36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";
    let docker_v1 = "9 8 0:32 /docker/abc /sys/fs/cgroup/memory ro master:1 - cgroup cgroup rw,memory";
    let blank = "9 8 0:32 / /mnt/my\\040groups ro - cgroup2 none rw";
    use Version::{V1, V2};
    let table: [(&str, &str, &str, Vec<Group>); 9] = [
        ("v2 in its namespace", "0::/\n", V2_MOUNT, vec![group("/sys/fs/cgroup/", V2)]),
        (
            "v2 with ancestors",
            "0::/kubepods/pod1/c1\n",
            V2_MOUNT,
            [
                "/sys/fs/cgroup/kubepods/pod1/c1",
                "/sys/fs/cgroup/kubepods/pod1",
                "/sys/fs/cgroup/kubepods",
                "/sys/fs/cgroup",
            ]
            .map(|folder| group(folder, V2))
            .to_vec(),
        ),
        ("v2 moved out of its namespace", "0::/../other\n", V2_MOUNT, vec![group("/sys/fs/cgroup", V2)]),
        (
            "both, memory under v1",
            "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
            v1_mounts,
            vec![
                group("/sys/fs/cgroup/memory/a/b", V1),
                group("/sys/fs/cgroup/memory/a", V1),
                group("/sys/fs/cgroup/memory", V1),
                group("/sys/fs/cgroup/unified/", V2),
            ],
        ),
        ("v1 container", "4:memory:/docker/abc\n", docker_v1, vec![group("/sys/fs/cgroup/memory/", V1)]),
        (
            "v1 container, nested",
            "4:memory:/docker/abc/x\n",
            docker_v1,
            vec![group("/sys/fs/cgroup/memory/x", V1), group("/sys/fs/cgroup/memory", V1)],
        ),
        ("v1 group that is not mounted", "4:memory:/other\n", docker_v1, vec![group("/sys/fs/cgroup/memory", V1)]),
        ("blanks", "0::/\n", blank, vec![group("/mnt/my groups", V2)]),
        ("nothing", "", "", vec![]),
    ];
    for (name, memberships, mounts, expected) in table {
        assert_eq!(groups(memberships, mounts), expected, "{name}");
    }
}

#[test]
fn reads_limits() {
    let table = [
        ("max\n", None),
        ("", None),
        ("9223372036854771712\n", None),
        ("536870912\n", Some(536_870_912)),
        ("0\n", Some(0)),
        ("garbage", None),
    ];
    for (text, expected) in table {
        assert_eq!(limit(text), expected, "{text:?}");
    }
}

#[test]
fn counts_clean_file_cache_as_free() {
    let v2 = ["inactive_file", "active_file"];
    let v1 = ["total_inactive_file", "total_active_file"];
    let stat = "anon 300\nfile 250\nshmem 50\nfile_dirty 20\nfile_writeback 10\ninactive_file 150\nactive_file 50\n";
    let stat_v1 = "cache 1\ninactive_file 7\nactive_file 7\ndirty 7\ntotal_inactive_file 150\ntotal_active_file 50\n\
        total_dirty 20\ntotal_writeback 10\n";
    let table = [
        ("v2: 1000 - 550 + 200 - 30", 1000, "550\n", stat, v2, Some(620)),
        ("v1: the hierarchy's counts", 1000, "550\n", stat_v1, v1, Some(620)),
        ("no counts", 1000, "550\n", "", v2, Some(450)),
        ("over the limit", 500, "950\n", stat, v2, Some(0)),
        ("more cache than use, as counters lag", 1000, "100\n", stat, v2, Some(1000)),
        ("no use", 1000, "", stat, v2, None),
    ];
    for (name, limit, usage, stat, cache, expected) in table {
        assert_eq!(group_room(limit, usage, stat, cache).map(|room| room.free), expected, "{name}");
    }
}

#[test]
fn reads_the_machine() {
    let text = "MemTotal:       24684084 kB\nMemFree:        22473448 kB\nMemAvailable:   23616712 kB\nCached:  5 kB\n";
    assert_eq!(machine_room(text), Some(Room { total: 24_684_084 << 10, free: 23_616_712 << 10 }));
    assert_eq!(machine_room("MemTotal: 5 kB\n"), None);
    assert_eq!(machine_room(""), None);
}

/// Every level limits, the innermost or not, and version 2 also by the mark where the kernel begins to throttle.
#[test]
fn the_tightest_level_counts() {
    let folder = std::env::temp_dir().join(format!("concertina-cgroup-{}", std::process::id()));
    let inner = folder.join("inner");
    fs::create_dir_all(&inner).unwrap();
    let gib = |n: u64| (n << 30).to_string();
    for (path, max, high, current) in
        [(&folder, gib(1), "max".into(), gib(0)), (&inner, "max".into(), gib(1) + "\n", gib(2))]
    {
        fs::write(path.join("memory.max"), max).unwrap();
        fs::write(path.join("memory.high"), high).unwrap();
        fs::write(path.join("memory.current"), current).unwrap();
        fs::write(path.join("memory.stat"), "inactive_file 1610612736\n").unwrap();
    }
    let room = |folder: &Path| Watched::new(&Group { folder: folder.into(), version: Version::V2 }).room();
    assert_eq!(room(&folder), Some(Room { total: 1 << 30, free: 1 << 30 }));
    assert_eq!(room(&inner), Some(Room { total: 1 << 30, free: 512 << 20 }));
    let groups = [&inner, &folder].map(|folder| Group { folder: folder.clone(), version: Version::V2 }).to_vec();
    assert_eq!(Groups::of(&groups).room().free, (512 << 20).min(Groups::of(&[]).room().free));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn this_process_has_room() {
    let room = Groups::of_this_process().room();
    assert!(room.free > 0 && room.free <= room.total && room.total < UNLIMITED, "{room:?}");
}
