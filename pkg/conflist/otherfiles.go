// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// followInOthers replaces the entries that ip-masq wrote into other files of a network, once the network's
// own file has that of the entry file. Such another file is the main CNI plugin's, where a service mesh
// made the file that the runtime uses of it: the mesh copies the entry again whenever it starts.
func (m *Manager) followInOthers(ctx context.Context, n Network, s *Status) error {
	follows := m.FromFile && len(differences(n.entryText(), m.Entry)) == 0
	if !follows {
		return nil
	}
	if m.others.waits(s) {
		return m.others.err
	}
	err := m.replaceInOthers(ctx, n)
	if err != nil {
		m.others.fail(err, s)
		return err
	}
	m.others = attempt{}
	return nil
}

func (m *Manager) replaceInOthers(ctx context.Context, n Network) error {
	dir, err := config.ReadConfDir(m.Dir)
	if err != nil {
		return err
	}
	record := readEntryRecord(m.RecordPath)
	for _, list := range dir.Conflists {
		isOther := list.Network == n.Name && list.File != n.Path && !list.IsMultus()
		if !isOther || !list.IsList() || len(list.Entries) != 1 {
			continue
		}
		other := Network{Path: list.File, Name: list.Network, Entries: 1, Conflist: list}
		have := other.entryText()
		changed := differences(have, m.Entry)
		isOurs := slices.Contains(record.Digests[list.File], digestOf(have))
		if len(changed) == 0 || !isOurs {
			continue
		}
		err := m.replaceIn(ctx, other)
		if err != nil {
			return err
		}
		m.Log.Info("replaced the plugin entry", "file", policy.Printable(list.File),
			"network", policy.Printable(list.Network), "changed", strings.Join(changed, ","))
	}
	return nil
}

// replaceIn replaces the entry of a file by the one of the entry file, and records both until that is done.
func (m *Manager) replaceIn(ctx context.Context, n Network) error {
	now, err := setEntry(n.Path, n.Conflist.Doc, m.Entry, true)
	if err != nil {
		return err
	}
	if err := m.recordEntries(ctx, n, n.entryText(), m.Entry); err != nil {
		return err
	}
	_, err = m.write(ctx, Change{Network: n.Name, Path: n.Path}, n.Path, n.Conflist.Doc, now)
	if err != nil {
		return err
	}
	return m.recordEntries(ctx, n, m.Entry)
}
