// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// conflistEntry returns the entry that belongs in the conflist: that of
// conflist.entry_file, or one that states nothing where the file that is meant by
// default is not there. The plugin has to keep its state where the reconciler
// does, so where the administrators have not said where (plugin.toml), the entry
// has to.
func conflistEntry(s config.Settings, guard config.PluginFile) ([]byte, error) {
	const key = "conflist.entry_file"
	path := s.Conflist.EntryFile
	_, err := os.Stat(path)
	absent := errors.Is(err, fs.ErrNotExist)
	if absent && path != config.DefaultEntryFile {
		return nil, fmt.Errorf("%s: %s is not there; write the entry into it, or leave the key out for an entry that states nothing",
			key, policy.Quote(path))
	}
	entry, err := conflist.ReadEntry(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	_, dataDir := config.ParseLenient(entry)
	switch {
	case guard.Present || dataDir == s.DataDir:
		return entry, nil
	case absent:
		return json.Marshal(struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		}{config.PluginType, s.DataDir})
	}
	return nil, fmt.Errorf("%s: %s: dataDir: %s is not the data_dir of the reconciler; write %s into one of them, as both have to keep their state in one place",
		key, policy.Quote(path), policy.Quote(dataDir), policy.Quote(s.DataDir))
}

// usable tells why the plugin would refuse the dataDir, and with it every pod.
// One that is missing is made, and one that cannot be written it takes as long as
// the rules are right.
func usable(dir *store.Dir) error {
	_, err := dir.Load()
	if err == nil {
		now, cancel := context.WithCancel(context.Background())
		cancel()
		var lock *store.Lock
		if lock, err = dir.LockToRead(now); !errors.Is(err, store.ErrRefused) {
			return lock.Release()
		}
	}
	return fmt.Errorf("no pod would start with our entry: %w", err)
}
