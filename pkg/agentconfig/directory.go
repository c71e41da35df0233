// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// filePrefix is the start of the names of the agent files.
	filePrefix = "ip-masq"
	// configMapData is the link in a mounted ConfigMap to the directory with the current
	// version of the files. The kubelet replaces all files by replacing it.
	configMapData = "..data"
)

// file is one of the agent files, or why it cannot be read.
type file struct {
	name, path string
	text       []byte
	err        error
}

// The errors after which the directory is read again.
var (
	errChanged  = errors.New("it changes faster than it can be read")
	errDangling = errors.New(configMapData + " leads to nothing; mount the ConfigMap again, or remove the link")
)

// readDir returns the agent files of a directory by name, and whether it has other files.
// It reads until nothing changes meanwhile.
func readDir(dir string) (files []file, others bool, err error) {
	const attempts = 1000
	for range attempts {
		files, others, err = readDirOnce(dir)
		if !errors.Is(err, errChanged) && !errors.Is(err, errDangling) {
			break
		}
	}
	return files, others, err
}

func readDirOnce(dir string) (files []file, others bool, err error) {
	entries, err := list(dir)
	if err != nil {
		return nil, false, err
	}
	link := filepath.Join(dir, configMapData)
	target, err := os.Readlink(link)
	isConfigMap := err == nil
	inVersion := map[string]bool{}
	version := target
	if !filepath.IsAbs(target) {
		version = filepath.Join(dir, target)
	}
	if isConfigMap {
		current, err := list(version)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, false, errDangling
		case err != nil:
			return nil, false, fmt.Errorf("open %s: %w", configMapData, err)
		}
		for _, e := range current {
			inVersion[e.Name()] = true
		}
		// A link to a file of the version is read in the version.
		entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool {
			to, err := os.Readlink(filepath.Join(dir, e.Name()))
			return inVersion[e.Name()] || err == nil && to == configMapData+"/"+e.Name()
		})
		entries = append(entries, current...)
	}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasPrefix(name, filePrefix) || strings.HasSuffix(name, "~") {
			others = others || !strings.HasPrefix(name, ".") && !e.IsDir()
			continue
		}
		f := file{name: name, path: filepath.Join(dir, name)}
		at := f.path
		if inVersion[name] {
			at = filepath.Join(version, name)
		}
		f.text, f.err = read(at)
		if errors.Is(f.err, errChanged) {
			return nil, false, errChanged
		}
		files = append(files, f)
	}
	// The kubelet removes a version after the link leads to another one.
	if now, err := os.Readlink(link); isConfigMap != (err == nil) || now != target {
		return nil, false, errChanged
	}
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return files, others, nil
}

func list(dir string) ([]fs.DirEntry, error) {
	d, err := config.OpenFile(dir, syscall.O_DIRECTORY)
	if errors.Is(err, syscall.ENOTDIR) {
		return nil, errors.New("not a directory; name the directory that holds the files")
	}
	if err != nil {
		return nil, config.Bare(err)
	}
	defer d.Close() //nolint:errcheck // nothing was written
	entries, err := d.ReadDir(-1)
	return entries, config.Bare(err)
}

func read(path string) ([]byte, error) {
	const limitKiB = 1024
	const remedy = "mend it, remove it, or give it a name that does not begin with " + filePrefix
	f, err := config.OpenFile(path, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if info, err := os.Lstat(path); err != nil || info.Mode()&fs.ModeSymlink == 0 {
			return nil, errChanged // it was in the directory, and may be there again
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w; %s", policy.Printable(path), config.Bare(err), remedy)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	text, err := config.ReadRegular(f, limitKiB, nil)
	if err != nil {
		return nil, fmt.Errorf("%w; %s", err, remedy)
	}
	return text, nil
}
