// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
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
	link := filepath.Join(dir, configMapData)
	target, err := os.Readlink(link)
	isConfigMap := err == nil
	paths := map[string]string{} // by the name of an agent file
	collect := func(from string) error {
		entries, err := os.ReadDir(from)
		if errors.Is(err, syscall.ENOTDIR) {
			return errors.New("not a directory; name the directory that holds the files")
		}
		for _, e := range entries {
			name, path := e.Name(), filepath.Join(from, e.Name())
			to, notLink := os.Readlink(path)
			switch {
			case isConfigMap && notLink == nil && to == configMapData+"/"+name: // it is read in the version
			case strings.HasPrefix(name, filePrefix) && !strings.HasSuffix(name, "~"):
				paths[name] = path
			default:
				others = others || !strings.HasPrefix(name, ".") && !e.IsDir()
			}
		}
		return err
	}
	if err := collect(dir); err != nil {
		return nil, false, err
	}
	if isConfigMap {
		version := target
		if !filepath.IsAbs(target) {
			version = filepath.Join(dir, target)
		}
		switch err := collect(version); {
		case errors.Is(err, fs.ErrNotExist):
			return nil, false, errDangling
		case err != nil:
			return nil, false, safefile.Error("open", link, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(paths)) {
		f := file{name: name, path: filepath.Join(dir, name)}
		if f.text, f.err = read(paths[name]); errors.Is(f.err, errChanged) {
			return nil, false, errChanged
		}
		files = append(files, f)
	}
	// The kubelet removes a version after the link leads to another one.
	if now, err := os.Readlink(link); isConfigMap != (err == nil) || now != target {
		return nil, false, errChanged
	}
	return files, others, nil
}

func read(path string) ([]byte, error) {
	const maxSize = 1 << 20
	text, _, err := safefile.ReadFile(path, maxSize)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, errChanged // it was in the directory, and may be there again
	case err != nil:
		return nil, fmt.Errorf("%w; fix it, remove it, or give it a name that does not begin with %s", err, filePrefix)
	}
	return text, nil
}
