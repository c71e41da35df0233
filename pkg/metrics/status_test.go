// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// richStatus returns a Monitor of a node on which much is going on.
func richStatus(t *testing.T) *metrics.Monitor {
	t.Helper()
	r := rich()
	m := newMonitor(metrics.Options{
		Version: "v1.2.3", PluginVersion: func() string { return "v1.2.2" },
		State: func(context.Context) *enforce.State { return inSync(nftables, r.State.Sources...) },
	})
	s := config.DefaultSettings()
	assert.NoError(t, errors.Join(s.Set("metrics_listen", ":9820"), s.Set("agent.masqChain", "OURS")))
	m.Settings(metrics.Settings{Settings: s, Err: errors.New("/etc/ip-masq/reconciler.toml:3: x: is not a known key; remove it")})
	r.Sources.Agent = &agentconfig.Files{
		Dir: "/etc/config", Names: []string{"ip-masq-agent"}, Source: r.State.Sources[0], ResyncInterval: 5 * time.Second,
		UnknownKeys: []string{"unknown key"}, Warnings: []string{"null"},
	}
	r.Sources.AgentErr = errors.New("nonMasqueradeCIDRs[0]: is null")
	r.Warnings = []error{errors.New("use backend nftables")}
	r.By = reconcile.Writer{Process: reconcile.Process{PID: 4711, Program: "iptables"}}
	r.Drift = policy.Diff{{Kind: policy.RuleChange, Chain: "A"}, {Kind: policy.RuleChange, Chain: "A", Unexpected: true}, {Kind: policy.JumpChange, Chain: "B"}}
	r.Problems = append(r.Problems, reconcile.Problem{Reason: reconcile.ReasonConflist, Err: errors.New("no entry")})
	r.Conflist = &conflist.Status{Inserted: 1}
	m.Report(r, 5*time.Second)
	return m
}

// status requests the status, whose pid is replaced.
func status(t *testing.T, m *metrics.Monitor) (text string, s metrics.Status) {
	t.Helper()
	w := get(m.Socket(), "/v1/status")
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("%d %v %s", w.Code, w.Header(), w.Body)
	}
	text = strings.Replace(w.Body.String(), fmt.Sprintf(`"pid":%d`, os.Getpid()), `"pid":12`, 1)
	assert.NoError(t, json.Unmarshal([]byte(text), &s))
	return text, s
}

// A change of the golden file that is more than new fields needs another version of the path.
func TestStatusGolden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := richStatus(t)
		time.Sleep(1500 * time.Millisecond)
		text, s := status(t, m)
		var indented any
		assert.NoError(t, json.Unmarshal([]byte(text), &indented))
		got := assert.Must(json.MarshalIndent(indented, "", "  "))(t)
		golden.Check(t, "testdata/status.json", append(got, '\n'))
		if again, err := json.Marshal(s); err != nil || string(again)+"\n" != text {
			t.Errorf("decoded and encoded again: %v\n%s\n%s", err, again, text)
		}
		files, err := s.ReadAgentFiles()
		if err == nil || err.Error() != "nonMasqueradeCIDRs[0]: is null" || len(files.Warnings) != 1 || files.Source.Policy.Chain == "" {
			t.Errorf("the agent files are %+v, %v", files, err)
		}
	})
}

// Lists are never null.
func TestStatusAtTheBeginning(t *testing.T) {
	text, s := status(t, newMonitor(metrics.Options{}))
	if strings.Contains(text, "null") || s.AgentFiles != nil || len(s.Problems) != 1 {
		t.Error(text)
	}
}

func TestStatusHasTheLatestRepairs(t *testing.T) {
	m := newMonitor(metrics.Options{})
	for i := range 12 {
		m.Report(&reconcile.Report{
			Started: time.Unix(int64(i), 0), By: reconcile.Writer{Process: reconcile.Process{PID: 1, Program: "nft"}}, Drift: policy.Diff{{Chain: "A"}},
		}, time.Minute)
	}
	m.Report(&reconcile.Report{}, time.Minute)
	_, s := status(t, m)
	if s.RepairsTotal != 12 || len(s.Repairs) != 10 || s.Repairs[0].At.Unix() != 11 || s.Repairs[9].At.Unix() != 2 {
		t.Errorf("%d repairs: %+v", s.RepairsTotal, s.Repairs)
	}
}

// The socket is served in the dataDir, and clients connect by the dataDir alone.
func TestServeSocket(t *testing.T) {
	noLeak(t)
	d := store.Open(filepath.Join(t.TempDir(), "data"))
	m := newMonitor(metrics.Options{Version: "v1.2.3"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	log := make(lines, 100)
	go func() {
		defer close(ended)
		m.ServeSocket(ctx, d, log.logger())
	}()
	if line := <-log; !strings.Contains(line, d.SocketPath()) { // without a dataDir
		t.Errorf("the log has %s", line)
	}
	instance, err := d.InstanceLock()
	assert.NoError(t, err)
	defer func() { _ = instance.Release() }()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return d.Dial(ctx) },
	}}
	var s metrics.Status
	var answer *http.Response
	if !timelimit.Await(timelimit.Wait, func() bool {
		answer, err = client.Get("http://reconciler/v1/status")
		return err == nil
	}) {
		t.Fatal(err)
	}
	assert.NoError(t, errors.Join(json.NewDecoder(answer.Body).Decode(&s), answer.Body.Close()))
	if s.Version != "v1.2.3" || s.PID != os.Getpid() {
		t.Errorf("%+v", s)
	}
	cancel()
	<-ended
	if c, err := d.Dial(t.Context()); err == nil {
		t.Error("the socket is served after the end")
		_ = c.Close()
	}
}
