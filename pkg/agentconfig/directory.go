// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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

// errChanged is an error after which the directory is read again.
var errChanged = errors.New("it changes faster than it can be read, or " + configMapData + " leads to nothing: mount the ConfigMap again, or remove the link")

// readDir returns the agent files of a directory by name, and whether it has other files.
// It reads until nothing changes meanwhile.
func readDir(dir string) (files []file, others bool, err error) {
	const attempts = 1000
	for range attempts {
		if files, others, err = readDirOnce(dir); !errors.Is(err, errChanged) {
			break
		}
	}
	return files, others, err
}

func readDirOnce(dir string) (files []file, others bool, err error) {
	link, from := filepath.Join(dir, configMapData), dir
	version, _ := os.Readlink(link) // none in a directory that is no ConfigMap
	switch {
	case filepath.IsAbs(version):
		from = version
	case version != "":
		from = filepath.Join(dir, version)
	}
	entries, err := os.ReadDir(from)
	switch {
	case errors.Is(err, syscall.ENOTDIR):
		return nil, false, errors.New("not a directory; name the directory that holds the files")
	case errors.Is(err, fs.ErrNotExist) && from != dir: // the kubelet has removed the version
		return nil, false, errChanged
	case err != nil:
		return nil, false, err
	}
	for _, e := range entries {
		name := e.Name()
		if !strings.HasPrefix(name, filePrefix) || strings.HasSuffix(name, "~") {
			others = others || !strings.HasPrefix(name, ".") && !e.IsDir()
			continue
		}
		f := file{name: name, path: filepath.Join(dir, name)}
		if f.text, f.err = read(filepath.Join(from, name)); errors.Is(f.err, errChanged) {
			return nil, false, errChanged
		}
		files = append(files, f)
	}
	// The kubelet removes the files of a version, one after another, once the link leads to the next.
	if now, _ := os.Readlink(link); now != version {
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
