// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
)

// noLeak fails where there are more goroutines in the end than now.
func noLeak(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if !timelimit.Await(timelimit.Wait, func() bool { return runtime.NumGoroutine() <= before }) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, stacks[:runtime.Stack(stacks, true)])
		}
	})
}

// occupied returns a listener on a port of its own.
func occupied(t *testing.T) net.Listener {
	t.Helper()
	l := assert.Must(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	return l
}

// lines are those of a log.
type lines chan string

// Write takes a line of the log.
func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func (l lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// started is a Serve under way.
type started struct {
	url  string
	log  lines
	stop context.CancelFunc
	over chan struct{}
}

func start(t *testing.T, address string, h http.Handler) *started {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &started{"http://" + address, make(lines, 100), cancel, make(chan struct{})}
	go func() {
		defer close(s.over)
		newMonitor(metrics.Options{}).Serve(ctx, "metrics_listen", address, h, s.log.logger())
	}()
	t.Cleanup(func() { s.end(t) })
	return s
}

func (s *started) end(t *testing.T) {
	t.Helper()
	s.stop()
	select {
	case <-s.over:
	case <-time.After(timelimit.Wait):
		t.Error("Serve goes on after its context ended")
	}
}

// fetch asks until somebody answers.
func (s *started) fetch(t *testing.T, path string) string {
	t.Helper()
	var resp *http.Response
	var err error
	if !timelimit.Await(timelimit.Wait, func() bool {
		resp, err = http.Get(s.url + path)
		return err == nil
	}) {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body := assert.Must(io.ReadAll(resp.Body))(t)
	return string(body)
}

func TestServeTriesAgainUntilThePortIsFree(t *testing.T) {
	noLeak(t)
	l := occupied(t)
	address := l.Addr().String()
	s := start(t, address, newMonitor(metrics.Options{}).Health())
	select {
	case text := <-s.log:
		assert.Contains(t, "log", text, address, "key=metrics_listen", "address already in use", "or set metrics_listen to another")
	case <-time.After(timelimit.Wait):
		t.Fatal("the log does not have that the port is occupied")
	}
	time.Sleep(1500 * time.Millisecond) // for a second try in vain
	l.Close()
	assert.Equal(t, "answer", s.fetch(t, "/livez"), "ok\n")
	s.end(t)
	if len(s.log) > 0 {
		t.Errorf("the log has more: %s", <-s.log)
	}
	again, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatalf("the port is not free after the end: %v", err)
	}
	again.Close()
}

func TestServeWithoutAnAddressIsOff(t *testing.T) {
	s := start(t, "", newMonitor(metrics.Options{}).Health())
	<-s.over
}

func TestServeLetsAnswersBeFinished(t *testing.T) {
	noLeak(t)
	l := occupied(t)
	l.Close()
	arrived := make(chan struct{})
	s := start(t, l.Addr().String(), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(arrived)
		<-r.Context().Done() // it ends with Serve's
		time.Sleep(50 * time.Millisecond)
		_, _ = io.WriteString(w, "finished")
	}))
	got := make(chan string)
	go func() { got <- s.fetch(t, "/") }()
	<-arrived
	s.end(t)
	assert.Equal(t, "answer", <-got, "finished")
}

// A user who opens connections without end, and keeps them open, gets few of them and keeps out no probe.
func TestConnectionsAreBounded(t *testing.T) {
	noLeak(t)
	const limit, opened = 64, 1000
	l := occupied(t)
	l.Close()
	s := start(t, l.Addr().String(), newMonitor(metrics.Options{}).Health())
	s.fetch(t, "/livez")
	http.DefaultClient.CloseIdleConnections()
	before := runtime.NumGoroutine()
	var all []net.Conn
	for i := range opened {
		c := assert.Must(net.Dial("tcp", l.Addr().String()))(t)
		defer c.Close()
		all = append(all, c)
		if i%2 == 0 { // a request that never ends
			_, _ = io.WriteString(c, "GET /livez HTTP/1.1\r\n") // fails where c is closed already
		}
	}
	begun := time.Now()
	if got := s.fetch(t, "/livez"); got != "ok\n" || timelimit.Exceeded(time.Since(begun), time.Second) {
		t.Errorf("got %q after %s", got, time.Since(begun))
	}
	const ofTheClient = 2 // goroutines of its idle connection
	if more := runtime.NumGoroutine() - before; more > limit+ofTheClient {
		t.Errorf("%d goroutines for %d connections", more, opened)
	}
	var reads sync.WaitGroup
	var closed atomic.Int64
	for _, c := range all {
		reads.Go(func() {
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				closed.Add(1)
			}
		})
	}
	want := int64(opened - limit + 1)
	timelimit.Await(timelimit.Wait, func() bool { return closed.Load() >= want })
	for _, c := range all {
		_ = c.SetReadDeadline(time.Now())
	}
	reads.Wait()
	assert.Equal(t, "closed connections", closed.Load(), want)
}
