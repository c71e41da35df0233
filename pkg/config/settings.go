// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Default paths of reconciler.toml and of the plugin entry to insert into conflists.
const (
	DefaultReconcilerFile = "/etc/ip-masq/reconciler.toml"
	DefaultEntryFile      = "/etc/ip-masq/entry.json"
)

// Settings are the settings of the reconciler, from reconciler.toml and flags.
type Settings struct {
	ResyncInterval time.Duration // at least 1s
	Backend        policy.Backend

	// Directories: absolute and clean. AgentConfigDir is "" if off.
	CNIConfDir, CNIBinDir, AgentConfigDir string
	AgentDialect                          Dialect
	DataDir                               string

	// Addresses, HOST:PORT; "" is off.
	HealthListen, MetricsListen string

	LogFormat string // text or json

	Agent    *AgentPolicy // nil unless [agent] or one of its flags is given
	Conflist ConflistSettings
}

// ConflistSettings are the settings of the conflist manager.
type ConflistSettings struct {
	Manage    bool
	Network   string // "" is the network that the runtime picks
	EntryFile string
}

// DefaultSettings returns the settings without a file and flags.
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

// The tables of reconciler.toml.
const (
	agentTable    = "agent"
	conflistTable = "conflist"
)

// keys is the table of the keys of reconciler.toml, in the order of its documentation. Every
// key is a flag too. Agent must not be nil.
func (s *Settings) keys() []Key {
	d := DefaultSettings()
	keys := []Key{
		{"resync_interval", Interval(&s.ResyncInterval), "verify all rules after this `TIME` too, beside events: 60s, 2m, or seconds"},
		{"backend", backend(&s.Backend),
			"`BACKEND` of chains for which no source states one: auto, iptables or nftables"},
		{"cni_conf_dir", directory(&s.CNIConfDir, d.CNIConfDir), "`DIR` of the conflists that the container runtime reads"},
		{"cni_bin_dir", directory(&s.CNIBinDir, d.CNIBinDir), "`DIR` of the CNI plugins that the container runtime runs"},
		{"agent_config_dir", text(&s.AgentConfigDir, "/etc/config", orEmpty(pathLike("/etc/config"))),
			"`DIR` of the agents' files (ip-masq*), such as /etc/config; off if not given"},
		{"agent_dialect", oneOf(&s.AgentDialect, DialectV1, DialectV2),
			"meaning of an agent file without nonMasqueradeCIDRs: `v1`, the list is left to other files; v2, the list is empty"},
		{"data_dir", directory(&s.DataDir, d.DataDir), "`DIR` of the node's state; the plugin must have the same"},
		{"health_listen", text(&s.HealthListen, d.HealthListen, orEmpty(parseListen)), "`HOST:PORT` of /livez, /readyz and /healthz; empty for off"},
		{"metrics_listen", text(&s.MetricsListen, ":9820", orEmpty(parseListen)), "`HOST:PORT` of /metrics; off if not given"},
		{"log_format", oneOf(&s.LogFormat, "text", "json"), "`FORMAT` of the log: text or json"},
		{agentTable, table(), ""},
	}
	for _, k := range s.Agent.Keys() {
		k.Name = agentTable + "." + k.Name
		keys = append(keys, k)
	}
	return append(keys,
		Key{conflistTable, table(), ""},
		Key{"conflist.manage", boolean(&s.Conflist.Manage), "insert the plugin entry again when it is missing from the conflist"},
		Key{"conflist.network", text(&s.Conflist.Network, "podnet", orEmpty(parseNetworkName)),
			"`NETWORK` whose conflist gets the plugin entry; the one that the runtime picks if not given"},
		Key{"conflist.entry_file", directory(&s.Conflist.EntryFile, d.Conflist.EntryFile), "`FILE` with the plugin entry to insert, as JSON"},
	)
}

// table accepts a table, whose keys are members of their own.
func table() Value {
	return Value{Kind: Object, Read: func(d *Document, key string, value json.RawMessage) {
		if KindOf(value) != Object {
			d.Fail(key, -1, "", fmt.Sprintf("is not a table; write [%s] on a line of its own, and its keys below", key))
		}
	}}
}

// Read reads reconciler.toml into the settings. What it does not state stays as it is, and so
// does everything after an error. A missing file is an fs.ErrNotExist, and bad contents are a
// DocumentError with every mistake.
//
// The policy in [agent] is validated on its own, except for IPv6, which one of the agents'
// files may enable.
func (s *Settings) Read(path string) error {
	doc, err := readFile(path, mostTOML)
	if err != nil {
		return err
	}
	return s.parse(path, doc)
}

func (s *Settings) parse(path string, doc []byte) error {
	members, err := tomlMembers(path, doc, agentTable, conflistTable)
	if err != nil {
		return err
	}
	next := s.editable()
	d := Document{File: path}
	d.Read(members, next.keys())
	d.Table = agentTable + "."
	next.Agent.Validate(&d, true)
	if err := d.Err(); err != nil {
		return err
	}
	stated := s.Agent != nil
	written := Document{File: path, Lines: map[string]Position{}, Indexes: map[string][]int{}}
	for _, m := range members {
		name, inTable := strings.CutPrefix(m.Key, d.Table)
		stated = stated || inTable || m.Key == agentTable
		if inTable {
			written.Lines[name], written.Indexes[name] = d.Lines[m.Key], d.Indexes[m.Key]
		}
	}
	if next.Agent.Written = written; !stated {
		next.Agent = nil
	}
	*s = next
	return nil
}

// editable returns a copy whose Agent can be changed, and is not nil.
func (s *Settings) editable() Settings {
	next := *s
	next.Agent = new(AgentPolicy)
	if s.Agent != nil {
		*next.Agent = *s.Agent
	}
	w := &next.Agent.Written
	w.Lines, w.Indexes = maps.Clone(w.Lines), maps.Clone(w.Indexes)
	return next
}

// Equal reports whether both state the same, wherever it is written.
func (s Settings) Equal(t Settings) bool {
	a, b := s.Agent, t.Agent
	s.Agent, t.Agent = nil, nil
	return s == t && (a == nil) == (b == nil) && (a == nil || a.Equal(*b))
}

// AgentSource returns the reconciler's own policy, and whether the agent files are a source:
// agent_config_dir, [agent] or one of its flags makes them one. The backend in the settings
// is the source's, unless the policy has one of its own.
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

// Field is one key of the settings, for a flag.
type Field struct {
	Key   string // resync_interval, agent.masqChain, conflist.manage
	Usage string // one line, the value's placeholder in backquotes
	Bool  bool   // true or false: the flag needs no value
	Value string // the current value as text; "" if none is stated
}

// Fields returns every key of the settings, in the order of the documentation.
func (s *Settings) Fields() []Field {
	var fields []Field
	c := s.editable()
	for _, k := range c.keys() {
		if k.Kind != Object {
			fields = append(fields, Field{k.Name, k.Usage, k.Kind == Boolean, k.Text()})
		}
	}
	return fields
}

// Set sets a key to the text of a flag: the value as in reconciler.toml, a list with commas
// between its items. The value is validated on its own, as the other flags are not known
// yet. After an error the settings are unchanged.
func (s *Settings) Set(key, text string) error {
	var d Document
	alone := Settings{Agent: &AgentPolicy{CIDRLimit: policy.MaxCIDRLimit}}
	alone.set(&d, key, text)
	d.Table = agentTable + "."
	alone.Agent.Validate(&d, true)
	if err := d.Err(); err != nil {
		return err
	}
	next := s.editable()
	next.set(new(Document), key, text)
	name, inTable := strings.CutPrefix(key, d.Table)
	delete(next.Agent.Written.Lines, name)
	delete(next.Agent.Written.Indexes, name)
	if s.Agent == nil && !inTable {
		next.Agent = nil
	}
	*s = next
	return nil
}

func (s *Settings) set(d *Document, key, text string) {
	for _, k := range s.keys() {
		if k.Name != key {
			continue
		}
		value, problem := k.fromFlag(text)
		encoded, err := json.Marshal(value)
		if err != nil {
			problem = policy.Printable(err.Error())
		}
		if problem != "" {
			d.Fail(key, -1, text, problem)
			return
		}
		k.Read(d, key, encoded)
	}
}
