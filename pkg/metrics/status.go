// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const statusPath = "/v1/status"

// Status is the state of the active reconciler, as its socket serves it at /v1/status. If fields have another
// meaning, the path has another version.
type Status struct {
	Version string    `json:"version"` // of the reconciler
	PID     int       `json:"pid"`     // in its own PID namespace
	Started time.Time `json:"started"`

	// The settings in force. SettingsErr is why they are not those of reconciler.toml as it is now.
	Settings    []config.Setting `json:"settings"`
	SettingsErr string           `json:"settingsError,omitempty"`
	AgentSource bool             `json:"agentSource"` // agent files are a source
	// The agent files as they were read last, or why they could not be read.
	AgentFiles *agentconfig.Files `json:"agentFiles,omitempty"`
	AgentErr   string             `json:"agentFilesError,omitempty"`

	Problems []reconcile.Problem `json:"problems"` // why the node is not ready

	Repairs         []Repair     `json:"repairs"`      // the latest ones, the newest first
	RepairsTotal    int          `json:"repairsTotal"` // since Started
	Chains          []ChainCount `json:"chains"`
	PluginVersion   string       `json:"pluginVersion,omitempty"` // of the installed plugin
	ConflistManaged bool         `json:"conflistManaged"`
	// ConflistFindings are the findings about the plugin entry.
	ConflistFindings []conflist.Finding `json:"conflistFindings,omitempty"`

	UnrecordedPods []reconcile.UnrecordedPod `json:"unrecordedPods,omitempty"` // of the runtime's cache

	ListenErrs []string `json:"listenErrors,omitempty"` // why addresses cannot be bound
}

// ReadAgentFiles returns what agentconfig.Read returned to the reconciler. AgentFiles must not be nil.
func (s *Status) ReadAgentFiles() (agentconfig.Files, error) {
	if s.AgentErr != "" {
		return *s.AgentFiles, errors.New(s.AgentErr)
	}
	return *s.AgentFiles, nil
}

// Repair is a sync that found rules changed by other programs.
type Repair struct {
	At         time.Time `json:"at"`
	By         string    `json:"by"` // the last program that changed rules before it
	Chains     []string  `json:"chains"`
	Missing    int       `json:"missing"`
	Unexpected int       `json:"unexpected"`
}

// ChainCount is what the metrics count of a chain of one family, since Started.
type ChainCount struct {
	policy.ChainFamily
	Connections  map[string]uint64 `json:"connections"`            // by action
	GuardPackets map[string]uint64 `json:"guardPackets,omitempty"` // by action
	Resets       uint64            `json:"resets,omitempty"`
}

// Settings are the settings in force.
type Settings struct {
	config.Settings
	Err   error             // why they are not those of reconciler.toml as it is now
	Flags map[string]string // for /flagz: the values by the names of their flags
}

// Settings records the settings in force.
func (m *Monitor) Settings(s Settings) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settings = s
}

// Status returns the state of the reconciler.
func (m *Monitor) Status() Status {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := Status{
		Version: m.options.Version, PID: os.Getpid(), Started: m.started.UTC(),
		Settings: m.settings.List(), AgentSource: m.settings.AgentSource(),
		Problems: append([]reconcile.Problem{}, m.problemsNow()...),
		Repairs:  append([]Repair{}, m.syncs.repaired...), RepairsTotal: m.syncs.total,
		Chains:        m.chainCounts(),
		PluginVersion: m.plugin, ConflistManaged: m.last.conflist != nil,
		UnrecordedPods: m.last.unrecorded, ListenErrs: slices.Sorted(maps.Values(m.listenErrs)),
	}
	if m.last.conflist != nil {
		s.ConflistFindings = m.last.conflist.Findings
	}
	if m.settings.Err != nil {
		s.SettingsErr = m.settings.Err.Error()
	}
	if m.last.sources == nil || m.last.sources.Agent == nil {
		return s
	}
	s.AgentFiles = m.last.sources.Agent
	if m.last.sources.AgentErr != nil {
		s.AgentErr = m.last.sources.AgentErr.Error()
	}
	return s
}

// chainCounts returns the numbers of each chain that has some, sorted.
func (m *Monitor) chainCounts() []ChainCount {
	counts := map[policy.ChainFamily]*ChainCount{}
	for s, n := range m.connections.sums {
		countOf(counts, s.ChainFamily).Connections[s.action] = n
	}
	for s, n := range m.guards.sums {
		countOf(counts, s.ChainFamily).GuardPackets[s.action] = n
	}
	for s, n := range m.resets.sums {
		countOf(counts, s.ChainFamily).Resets = n
	}
	list := []ChainCount{} // not null in JSON
	for _, c := range counts {
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b ChainCount) int {
		return cmp.Or(cmp.Compare(a.Chain, b.Chain), cmp.Compare(a.Family, b.Family))
	})
	return list
}

// countOf returns the numbers of a chain, which exist from then on.
func countOf(counts map[policy.ChainFamily]*ChainCount, at policy.ChainFamily) *ChainCount {
	if counts[at] == nil {
		counts[at] = &ChainCount{
			ChainFamily: at, Connections: map[string]uint64{}, GuardPackets: map[string]uint64{},
		}
	}
	return counts[at]
}

// Socket returns the handler of the socket of the active reconciler.
func (m *Monitor) Socket() http.Handler {
	return handler(map[string]http.HandlerFunc{"GET " + statusPath: m.serveStatus})
}

func (m *Monitor) serveStatus(w http.ResponseWriter, r *http.Request) {
	m.refreshed(r.Context(), time.Second, "status", m.observe) // clients wait longer
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(m.Status()) // the client is gone
}

// ReadStatus returns the Status that the reconciler of this node serves at the socket in its dataDir.
func ReadStatus(ctx context.Context, d *store.Dir) (*Status, error) {
	const most = 64 << 20 // agent files can have a million prefixes
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return d.Dial(ctx) }
	const url = "http://reconciler" + statusPath // the host may be any
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := (&http.Transport{DisableKeepAlives: true, DialContext: dial}).RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode == http.StatusNotFound {
		return nil, errors.New("it is of another version; use the program of its version")
	}
	s := &Status{}
	if err = json.NewDecoder(io.LimitReader(response.Body, most)).Decode(s); err != nil {
		return nil, fmt.Errorf("read its status: %w", err)
	}
	return s, nil
}
