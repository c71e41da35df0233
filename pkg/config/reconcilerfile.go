// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Where the reconciler's own file is, and the entry that it puts into conflists.
const (
	DefaultReconcilerFile = "/etc/ip-masq/reconciler.toml"
	DefaultEntryFile      = "/etc/ip-masq/entry.json"
)

// Settings are what the reconciler is told by its own file and its flags.
type Settings struct {
	ResyncInterval time.Duration // at least 1s
	Backend        policy.Backend

	// Directories: absolute and clean. An AgentConfigDir of "" is none.
	CNIConfDir, CNIBinDir, AgentConfigDir string
	AgentDialect                          Dialect
	DataDir                               string

	// Addresses, HOST:PORT; "" is off.
	HealthListen, MetricsListen string

	LogFormat string // text or json

	// Agent is nil unless [agent] or one of its flags was given.
	Agent    *AgentPolicy
	Conflist ConflistSettings
}

// ConflistSettings is about keeping our entry in the conflist of a network.
type ConflistSettings struct {
	Manage    bool
	Network   string // "" is the one that the runtime picks
	EntryFile string
}

// DefaultSettings returns what holds where neither the file nor a flag says
// otherwise.
func DefaultSettings() Settings {
	return Settings{
		ResyncInterval: time.Minute,
		Backend:        policy.Auto,
		CNIConfDir:     DefaultCNIConfDir,
		CNIBinDir:      "/opt/cni/bin",
		AgentDialect:   DialectV1,
		DataDir:        DefaultDataDir,
		HealthListen:   "127.0.0.1:19820",
		LogFormat:      "text",
		Conflist:       ConflistSettings{EntryFile: DefaultEntryFile},
	}
}

// Read reads the file into the settings, which keep what it does not state. A
// file that does not exist is an error too, an fs.ErrNotExist. What is wrong
// with the file's contents is a DocumentError with every mistake. After an error
// the settings are what they were.
//
// The policy of [agent] is judged by itself, but for IPv6, which one of the
// agents' files may enable: ReadAgentFiles judges that.
func (s *Settings) Read(path string) error {
	f, err := OpenFile(path, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", policy.Printable(path), Bare(err))
	}
	defer closed(f)
	// The TOML decoder's time can grow with the square of the size.
	const mostKiB = 64
	doc, err := ReadRegular(f, mostKiB, nil)
	if err != nil {
		return err
	}
	return s.parse(path, doc)
}

func (s *Settings) parse(path string, doc []byte) error {
	top, err := tomlMembers(path, doc)
	if err != nil {
		return err
	}
	next := s.clone()
	var mistakes []error
	for _, table := range settingsTables() {
		members := top
		if table != topTable {
			i := slices.IndexFunc(top, func(m Member) bool { return m.Key == table })
			if i < 0 {
				continue
			}
			inTable, found, err := tomlTableIn(path, doc, table)
			if err != nil {
				return err
			}
			members = inTable
			if !found {
				f := Document{File: path, line: top[i].Line}
				f.Fail(table, -1, "", fmt.Sprintf("is not a table; write [%s] on a line of its own, and its keys below", table))
				mistakes = append(mistakes, f.Mistakes...)
				continue
			}
		}
		mistakes = append(mistakes, next.readTable(path, table, members)...)
	}
	if len(mistakes) > 0 {
		return &DocumentError{Mistakes: mistakes}
	}
	*s = next
	return nil
}

func (s *Settings) readTable(path, table string, members []Member) []error {
	f := Document{File: path, Table: tablePrefix(table)}
	keys := s.table(table)
	if table == topTable {
		for _, t := range settingsTables()[1:] {
			keys = append(keys, Key{Name: t})
		}
		members = f.misplaced(members, keys)
	}
	f.Read(members, keys)
	if table == agentTable {
		s.Agent.Written = Document{File: path, Lines: f.Lines, Indexes: f.Indexes}
		s.Agent.Validate(&f, true)
	}
	return f.Mistakes
}

// misplaced finds keys of [agent] that stand above it, and leaves the others.
func (f *Document) misplaced(members []Member, keys []Key) []Member {
	agent := new(AgentPolicy).Keys()
	var others []Member
	for _, m := range members {
		named := func(k Key) bool { return k.Name == m.Key }
		if slices.ContainsFunc(agent, named) && !slices.ContainsFunc(keys, named) {
			f.line = m.Line
			f.Fail(m.Key, -1, "", "is a key of [agent]; write it below that line")
			continue
		}
		others = append(others, m)
	}
	return others
}

// Equal reports whether both are the same, wherever they are written.
func (s Settings) Equal(t Settings) bool {
	a, b := s.Agent, t.Agent
	s.Agent, t.Agent = nil, nil
	return s == t && (a == nil) == (b == nil) && (a == nil || a.Equal(*b))
}

// clone returns settings whose policy can be changed alone. What it points to is
// replaced as a whole, never changed.
func (s *Settings) clone() Settings {
	next := *s
	if s.Agent != nil {
		agent := *s.Agent
		agent.Written.Lines, agent.Written.Indexes = maps.Clone(agent.Written.Lines), maps.Clone(agent.Written.Indexes)
		next.Agent = &agent
	}
	return next
}

// AgentSource returns the reconciler's own policy, and whether the agent files
// are a source at all: agent_config_dir, [agent] or a flag of it makes them one.
// A backend that the settings name is what the source states, unless the
// policy has one of its own.
func (s *Settings) AgentSource() (AgentPolicy, bool) {
	var own AgentPolicy
	if s.Agent != nil {
		own = *s.Agent
	}
	if own.Policy.Backend == "" && s.Backend != policy.Auto {
		own.Policy.Backend = s.Backend
	}
	return own, s.AgentConfigDir != "" || s.Agent != nil
}
