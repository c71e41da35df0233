// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// agentFilePrefix is how the names of the agents' files begin.
	agentFilePrefix = "ip-masq"
	// configMapData is the link in a mounted ConfigMap that leads to the
	// version that holds. The kubelet replaces all files at once by renaming it.
	configMapData = "..data"
)

// agentDir is what a directory of agent files held at one moment.
type agentDir struct {
	files       []agentFile // sorted by name
	holdsOthers bool        // files that are none of the agents'
}

// agentFile is one file, or why it cannot be read.
type agentFile struct {
	name, path string
	doc        []byte
	err        error
}

// Why a reading has to begin again. It may never end: then this is the error.
var (
	errChanged  = errors.New("it changes faster than it can be read")
	errDangling = errors.New(configMapData + " leads to nothing; mount the ConfigMap again, or remove the link")
)

// readAgentDir reads the directory until nobody has changed it meanwhile.
func readAgentDir(dir string) (a agentDir, err error) {
	const mostTimes = 1000
	for range mostTimes {
		a, err = readAgentDirOnce(dir)
		if !errors.Is(err, errChanged) && !errors.Is(err, errDangling) {
			break
		}
	}
	return a, err
}

func readAgentDirOnce(dir string) (agentDir, error) {
	d, err := OpenFile(dir, syscall.O_DIRECTORY)
	if errors.Is(err, syscall.ENOTDIR) {
		return agentDir{}, errors.New("not a directory; name the directory that holds the files")
	}
	if err != nil {
		return agentDir{}, Bare(err)
	}
	defer closed(d)
	entries, err := d.ReadDir(-1)
	if err != nil {
		return agentDir{}, Bare(err)
	}
	data, err := openData(d)
	if err != nil {
		return agentDir{}, err
	}
	if data == nil {
		return readAgentEntries(dir, entries, func(string) *os.File { return d })
	}
	defer closed(data)
	version, err := data.ReadDir(-1)
	inVersion := map[string]bool{}
	for _, e := range version {
		inVersion[e.Name()] = true
	}
	// What the links of the directory stand for is read where it is.
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return inVersion[e.Name()] || leadsIntoData(d, e) })
	var a agentDir
	if err == nil {
		a, err = readAgentEntries(dir, append(entries, version...), func(name string) *os.File {
			if inVersion[name] {
				return data
			}
			return d
		})
	}
	// A version is removed once the link leads to another. While it leads to this
	// one still, all of it is there.
	if !leadsTo(d, data) {
		return agentDir{}, errChanged
	}
	return a, Bare(err)
}

// readAgentEntries reads those of the entries that are agent files, each in the
// directory that holds it.
func readAgentEntries(dir string, entries []fs.DirEntry, holder func(name string) *os.File) (agentDir, error) {
	var a agentDir
	for _, e := range entries {
		name := e.Name()
		if !isAgentFile(name) {
			a.holdsOthers = a.holdsOthers || !strings.HasPrefix(name, ".") && !e.IsDir()
			continue
		}
		file := agentFile{name: name, path: filepath.Join(dir, name)}
		file.doc, file.err = readAgentFile(holder(name), name, file.path)
		if errors.Is(file.err, errChanged) {
			return a, errChanged
		}
		a.files = append(a.files, file)
	}
	slices.SortFunc(a.files, func(a, b agentFile) int { return strings.Compare(a.name, b.name) })
	return a, nil
}

func readAgentFile(d *os.File, name, path string) ([]byte, error) {
	const mostKiB = 1024
	const remedy = "mend it, remove it, or give it a name that does not begin with " + agentFilePrefix
	f, err := openIn(d, name, path, 0)
	if _, isLink := linkIn(d, name); errors.Is(err, fs.ErrNotExist) && !isLink {
		return nil, errChanged // it was in the directory, and may be there again
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w; %s", policy.Printable(path), err, remedy)
	}
	defer closed(f)
	doc, err := ReadRegular(f, mostKiB, nil)
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, remedy)
	}
	return doc, nil
}

func isAgentFile(name string) bool {
	return strings.HasPrefix(name, agentFilePrefix) && !strings.HasSuffix(name, "~")
}

// openData opens the version of a ConfigMap that holds. It is nil where the
// directory is no mounted ConfigMap.
func openData(d *os.File) (*os.File, error) {
	if _, isLink := linkIn(d, configMapData); !isLink {
		return nil, nil
	}
	data, err := openIn(d, configMapData, filepath.Join(d.Name(), configMapData), unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errDangling
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", configMapData, err)
	}
	return data, nil
}

// leadsIntoData reports whether an entry is a link to what a version of the
// ConfigMap has by the same name.
func leadsIntoData(d *os.File, e fs.DirEntry) bool {
	target, isLink := linkIn(d, e.Name())
	return isLink && target == configMapData+"/"+e.Name()
}

// linkIn returns what a link in a directory says.
func linkIn(d *os.File, name string) (target string, isLink bool) {
	text := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(d.Fd()), name, text)
	if err != nil {
		return "", false
	}
	return string(text[:n]), true
}

// leadsTo reports whether the link of the ConfigMap leads to that version now.
func leadsTo(d, data *os.File) bool {
	var now, then unix.Stat_t
	return unix.Fstatat(int(d.Fd()), configMapData, &now, 0) == nil &&
		unix.Fstat(int(data.Fd()), &then) == nil && now.Dev == then.Dev && now.Ino == then.Ino
}

// openIn opens a name in a directory, whatever has become of that one's path.
// The file has the path as its name.
func openIn(d *os.File, name, path string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(d.Fd()), name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC|flags, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}
