// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// source is the source of every mount of this package in /proc/self/mountinfo.
const source = "ip-masq-sandbox"

// furnish sets up the new namespaces. It reports whether the root directory is now another mount of
// the same files.
func furnish() (moved bool, err error) {
	if moved, err = makePrivate(); err != nil {
		return moved, fmt.Errorf("make mounts private: %w", err)
	}
	if err := furnishMounts(); err != nil {
		return moved, err
	}
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return moved, fmt.Errorf("find loopback interface: %w", err)
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		return moved, fmt.Errorf("set loopback interface up: %w", err)
	}
	return moved, furnishPath()
}

func furnishMounts() error {
	if err := mountTmpfs("/run"); err != nil {
		return err
	}
	if err := furnishVarRun(); err != nil {
		return err
	}
	if err := mountOverlays("/etc", "/opt", "/var/lib"); err != nil {
		return err
	}
	// The directories that the project and its neighbors use by default start
	// empty, whatever the machine has there. tmpfs, not the overlay, because
	// its rename, fsync and inotify are those of an ordinary file system.
	for _, path := range []string{"/etc/cni", "/etc/ip-masq", "/opt/cni", "/var/lib/cni"} {
		if err := mountTmpfs(path); err != nil {
			return err
		}
	}
	// Mount namespaces that tests make can receive what is mounted here from now on.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make mounts shared: %w", err)
	}
	return nil
}

// makePrivate makes the following mounts invisible outside.
func makePrivate() (moved bool, err error) {
	private := func(path string) error { return unix.Mount("", path, "", unix.MS_REC|unix.MS_PRIVATE, "") }
	if err := private("/"); !errors.Is(err, unix.EINVAL) {
		return false, err
	}
	// In a chroot / need not be a mount point, and its mount cannot be named. So / is bound to a
	// private mount, which becomes the new root. /proc is a mount point everywhere, and a mount
	// below a private one stays private.
	const below = "/proc/sys"
	here, err := os.Getwd()
	if err != nil {
		return false, err
	}
	for _, step := range []func() error{
		func() error { return private("/proc") },
		func() error { return unix.Mount("/", below, "", unix.MS_BIND|unix.MS_REC, "") },
		func() error { return private(below) },
		func() error { return unix.Chroot(below) },
		func() error { return unix.Chdir(here) },
	} {
		if err := step(); err != nil {
			return false, fmt.Errorf("in a chroot: %w", err)
		}
	}
	return true, nil
}

// furnishVarRun makes /var/run the same as /run if it is not the usual symbolic link.
func furnishVarRun() error {
	info, err := os.Lstat("/var/run")
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("look for /var/run: %w", err)
	case !info.IsDir():
		return nil
	}
	if err := unix.Mount("/run", "/var/run", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("bind /run to /var/run: %w", err)
	}
	return nil
}

// mountOverlays lets the sandbox write to the directories without changing them, and mount on paths
// that the machine does not have. File systems mounted below them are not visible inside.
func mountOverlays(directories ...string) error {
	const staging = "/run/overlay"
	if err := mountTmpfs(staging); err != nil {
		return err
	}
	options, err := overlayOptions()
	if err != nil {
		return err
	}
	for i, path := range directories {
		upper := filepath.Join(staging, fmt.Sprint("upper", i))
		work := filepath.Join(staging, fmt.Sprint("work", i))
		for _, made := range []string{upper, work} {
			if err := os.Mkdir(made, 0o755); err != nil {
				return fmt.Errorf("make overlay directory: %w", err)
			}
		}
		layers := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s%s", path, upper, work, options)
		if err := unix.Mount(source, path, "overlay", 0, layers); err != nil {
			return fmt.Errorf("mount overlay on %s: %w", path, err)
		}
	}
	// The overlays keep the file system in use; its mount point is no longer needed.
	if err := unix.Unmount(staging, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", staging, err)
	}
	if err := os.Remove(staging); err != nil {
		return fmt.Errorf("remove overlay directory: %w", err)
	}
	return nil
}

// overlayOptions selects user.overlay.* extended attributes where the process may not write
// trusted.overlay.* ones: in every user namespace except the initial one (overlayfs, Linux 5.11).
func overlayOptions() (string, error) {
	ids, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return "", fmt.Errorf("read user namespace: %w", err)
	}
	if slices.Equal(strings.Fields(string(ids)), []string{"0", "0", "4294967295"}) {
		return "", nil
	}
	return ",userxattr", nil
}

func mountTmpfs(path string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return fmt.Errorf("make mount point: %w", err)
	}
	if err := unix.Mount(source, path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"); err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", path, err)
	}
	return nil
}

// furnishPath adds the directories of iptables and nft to PATH.
func furnishPath() error {
	path := filepath.SplitList(os.Getenv("PATH"))
	for _, sbin := range []string{"/usr/sbin", "/sbin"} {
		if !slices.Contains(path, sbin) {
			path = append(path, sbin)
		}
	}
	if err := os.Setenv("PATH", strings.Join(path, string(filepath.ListSeparator))); err != nil {
		return fmt.Errorf("set PATH: %w", err)
	}
	return nil
}
