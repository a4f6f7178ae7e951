//! How much memory the machine and the control groups around this process leave to it.
//!
//! Parsing is pure and works on the text of the kernel's files; [`Groups`] keeps them open, since they are read many times a second.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Version 1 writes "no limit" as the largest multiple of the page size; nothing real is near it.
const UNLIMITED: u64 = 1 << 60;

/// `memory.stat` has about 2 KiB.
const LIKELY_BYTES: usize = 4096;

/// The control groups that limit this process: its own and all its visible ancestors.
#[derive(Debug, Default)]
pub(super) struct Groups {
    machine: Kept,
    groups: Vec<Watched>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    version: Version,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// What a group or the machine has and leaves, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) total: u64,
    pub(super) free: u64,
}

impl Room {
    fn smaller_of_each(self, other: Self) -> Self {
        Self { total: self.total.min(other.total), free: self.free.min(other.free) }
    }
}

impl Groups {
    /// Finds the groups of this process. A process can be moved to another group, but containers do not do that.
    pub(super) fn of_this_process() -> Self {
        Self::of(&groups(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo")))
    }

    fn of(groups: &[Group]) -> Self {
        Self { machine: Kept::open("/proc/meminfo"), groups: groups.iter().map(Watched::new).collect() }
    }

    /// One group of version 2 whose files lie in this folder.
    #[cfg(test)]
    pub(super) fn in_folder(folder: PathBuf) -> Self {
        Self::of(&[Group { folder, version: Version::V2 }])
    }

    /// The least that the machine and any group leaves now. What cannot be read does not limit.
    pub(super) fn room(&self) -> Room {
        let unlimited = Room { total: u64::MAX, free: u64::MAX };
        let machine = machine_room(&self.machine.text()).unwrap_or(unlimited);
        self.groups.iter().filter_map(Watched::room).fold(machine, Room::smaller_of_each)
    }
}

/// The files of a group that say how much memory it has and uses.
#[derive(Debug)]
struct Watched {
    limits: Vec<Kept>,
    usage: Kept,
    stat: Kept,
    /// The lines of `stat` that count pages of files.
    cache: [&'static str; 2],
}

impl Watched {
    fn new(group: &Group) -> Self {
        let file = |name: &str| Kept::open(group.folder.join(name));
        let (limits, usage, cache): (&[&str], _, _) = match group.version {
            Version::V2 => (&["memory.max", "memory.high"], "memory.current", ["inactive_file", "active_file"]),
            Version::V1 => {
                let cache = ["total_inactive_file", "total_active_file"];
                (&["memory.limit_in_bytes"], "memory.usage_in_bytes", cache)
            }
        };
        let limits = limits.iter().map(|name| file(name)).collect();
        Self { limits, usage: file(usage), stat: file("memory.stat"), cache }
    }

    /// `None`: nothing limits it.
    fn room(&self) -> Option<Room> {
        let limit = self.limits.iter().filter_map(|file| limit(&file.text())).min()?;
        group_room(limit, &self.usage.text(), &self.stat.text(), self.cache)
    }
}

/// A file of the kernel, which writes it anew for whoever reads it from its beginning.
#[derive(Debug, Default)]
struct Kept(Option<File>);

impl Kept {
    /// A file that is not there now is taken for empty from now on.
    fn open(path: impl AsRef<Path>) -> Self {
        Self(File::open(path).ok())
    }

    /// What it says now; empty if it cannot be read.
    fn text(&self) -> String {
        let mut text = vec![0; LIKELY_BYTES];
        let mut len = 0;
        while let Some(file) = &self.0 {
            if len == text.len() {
                text.resize(2 * len, 0);
            }
            match file.read_at(&mut text[len..], len as u64) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return String::new(),
            }
        }
        text.truncate(len);
        String::from_utf8(text).unwrap_or_default()
    }
}

/// The text of a file; empty if there is none.
fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The groups around a process, from `/proc/self/cgroup` and `/proc/self/mountinfo`, innermost first.
fn groups(memberships: &str, mounts: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for mount in mounts.lines().filter_map(Mount::parse) {
        let Some(path) = memberships.lines().find_map(|line| membership(line, mount.version)) else { continue };
        // A path outside of what is mounted: of the groups around us, only the mounted root is visible.
        let inside = Path::new(path).strip_prefix(&mount.root).ok();
        let inside = inside.filter(|inside| !inside.components().any(|part| part.as_os_str() == ".."));
        let mut folder = mount.point.join(inside.unwrap_or(Path::new("")));
        loop {
            found.push(Group { folder: folder.clone(), version: mount.version });
            if folder == mount.point || !folder.pop() {
                break;
            }
        }
    }
    found
}

/// One line of `/proc/self/mountinfo` that mounts control groups with the memory controller.
struct Mount {
    version: Version,
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    fn parse(line: &str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1)?);
        let version = match kind {
            "cgroup2" => Version::V2,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::V1,
            _ => return None,
        };
        let mut before = before.split(' ').skip(3);
        Some(Self { version, root: unescaped(before.next()?), point: unescaped(before.next()?) })
    }
}

/// The kernel writes blanks in paths as octal numbers.
fn unescaped(path: &str) -> PathBuf {
    path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\").into()
}

/// The path of the group that a line of `/proc/self/cgroup` names, if it is of the memory controller.
fn membership(line: &str, version: Version) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let matches = match version {
        Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
        Version::V2 => id == "0" && controllers.is_empty(),
    };
    matches.then_some(path)
}

/// The number in a limit file; `None` if there is no limit.
fn limit(text: &str) -> Option<u64> {
    text.trim().parse().ok().filter(|bytes| *bytes < UNLIMITED)
}

/// What a group leaves: its limit less its use, plus the page cache, which the kernel drops before it kills. The lists of
/// file pages do not hold shared memory, which cannot be dropped; pages that have to be written first do not count.
fn group_room(limit: u64, usage: &str, stat: &str, cache: [&str; 2]) -> Option<Room> {
    let usage: u64 = usage.trim().parse().ok()?;
    let prefix = if cache[0].starts_with("total_") { "total_" } else { "file_" };
    let of = |name: &str| field(stat, name).unwrap_or(0);
    let unwritten = of(&format!("{prefix}dirty")) + of(&format!("{prefix}writeback"));
    let reclaimable = (of(cache[0]) + of(cache[1])).saturating_sub(unwritten);
    Some(Room { total: limit, free: limit.saturating_sub(usage.saturating_sub(reclaimable)) })
}

/// The value of a line `name value`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// What the machine has and leaves, from `/proc/meminfo`.
fn machine_room(meminfo: &str) -> Option<Room> {
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some(Room { total: kib("MemTotal")? << 10, free: kib("MemAvailable")? << 10 })
}

#[cfg(test)]
mod tests;
