// SPDX-License-Identifier: Apache-2.0

package mainplugins

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
)

// Mesh imitates a program that appends the plugin of a service mesh to conflists, and appends it again when another
// program has written a file. Each write decodes and formats the file, takes the plugin out and appends it at the end.
type Mesh struct {
	Dir  string // the configuration directory
	Type string // of the plugin
	// EachFile is how Linkerd's does it: in each file, and again after each write of another program. Istio's writes into
	// the first file alone, and only if the plugin is missing there.
	EachFile bool
	// Last is a program that wants its plugin to be the last one. Two of them fight.
	Last bool

	stop   chan struct{}
	ended  sync.WaitGroup
	wrote  map[string][]byte // the text that it wrote last, by path
	failed error
}

// Start injects the plugin, and again after changes, until Stop.
func (m *Mesh) Start() {
	m.stop, m.wrote = make(chan struct{}), map[string][]byte{}
	watcher := fswatch.New(m.Dir)
	m.ended.Go(func() {
		defer func() { m.failed = errors.Join(m.failed, watcher.Close()) }()
		for {
			if err := m.inject(); err != nil {
				m.failed = errors.Join(m.failed, err)
			}
			select {
			case <-m.stop:
				return
			case <-watcher.Changed():
			}
		}
	})
}

// Stop ends the program as SIGTERM does: it takes the plugin out of each file.
func (m *Mesh) Stop() error {
	m.Kill()
	errs := []error{m.failed}
	for _, path := range m.files() {
		_, err := edit(path, func(list object) bool { return withoutPlugin(list, m.Type) })
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Kill ends the program, and leaves the plugin where it is.
func (m *Mesh) Kill() {
	close(m.stop)
	m.ended.Wait()
}

func (m *Mesh) files() []string {
	files, _ := filepath.Glob(filepath.Join(m.Dir, "*.conflist")) // the pattern is valid
	if !m.EachFile && len(files) > 1 {
		return files[:1]
	}
	return files
}

func (m *Mesh) inject() error {
	for _, path := range m.files() {
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) || bytes.Equal(text, m.wrote[path]) {
			continue
		}
		if err != nil {
			return err
		}
		if !m.EachFile && m.isThere(text) {
			continue
		}
		m.wrote[path], err = edit(path, func(list object) bool {
			withoutPlugin(list, m.Type)
			list["plugins"] = append(list["plugins"].([]any), object{"type": m.Type, "log_level": "info"})
			return true
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// isThere reports whether the plugin is where this program wants it.
func (m *Mesh) isThere(text []byte) bool {
	var list struct{ Plugins []struct{ Type string } }
	if json.Unmarshal(text, &list) != nil {
		return true // it is being written
	}
	at := slices.IndexFunc(list.Plugins, func(p struct{ Type string }) bool { return p.Type == m.Type })
	return at >= 0 && (!m.Last || at == len(list.Plugins)-1)
}

type object = map[string]any

func withoutPlugin(list object, plugin string) (changed bool) {
	plugins, _ := list["plugins"].([]any)
	kept := slices.DeleteFunc(slices.Clone(plugins), func(p any) bool {
		o, _ := p.(object)
		return o["type"] == plugin
	})
	list["plugins"] = kept
	return len(kept) < len(plugins)
}

// edit decodes a file, replaces it if a function has changed what is in it, and returns the new text. A file that is gone,
// or is being written, stays as it is: then there is another event.
func edit(path string, change func(list object) bool) ([]byte, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list := object{}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	isWhole := decoder.Decode(&list) == nil
	if !isWhole || !change(list) {
		return nil, nil
	}
	now, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return nil, err
	}
	temp := strings.TrimSuffix(path, ".conflist") + fmt.Sprint(".", time.Now().UnixNano(), ".tmp")
	return now, errors.Join(os.WriteFile(temp, now, 0o644), os.Rename(temp, path))
}
