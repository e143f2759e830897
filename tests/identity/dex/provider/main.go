// Dex as one program for the tests: local users with groups, everything in memory.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/dexidp/dex/server"
	"github.com/dexidp/dex/server/connectors"
	"github.com/dexidp/dex/server/signer"
	"github.com/dexidp/dex/storage"
	"github.com/dexidp/dex/storage/memory"
)

type settings struct {
	Issuer, Listen, Cert, Key string
	Origins                   []string
	Algorithm                 string
	TokenSeconds              int
	Clients                   []storage.Client
	Users                     []struct {
		Email, Name, Password string
		Groups                []string
	}
}

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "dex:", err)
		os.Exit(1)
	}
}

func run(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var given settings
	if err := json.Unmarshal(text, &given); err != nil {
		return err
	}
	ctx, log := context.Background(), slog.New(slog.NewTextHandler(os.Stderr, nil))
	var passwords []storage.Password
	for _, user := range given.Users {
		hash, err := bcrypt.GenerateFromPassword([]byte(user.Password), 10)
		if err != nil {
			return err
		}
		passwords = append(passwords, storage.Password{
			Email: user.Email, Username: user.Name, UserID: "id-" + user.Name, Hash: hash, Groups: user.Groups,
		})
	}
	store := storage.WithStaticClients(memory.New(log), given.Clients)
	store = storage.WithStaticPasswords(store, passwords, log)
	local := storage.Connector{ID: connectors.LocalConnector, Type: connectors.LocalConnector, Name: "Email"}
	store = storage.WithStaticConnectors(store, []storage.Connector{local})
	valid := time.Duration(given.TokenSeconds) * time.Second
	keys := signer.LocalConfig{KeysRotationPeriod: "6h"}
	if given.Algorithm == "ES256" {
		keys.Algorithm = "ES256"
	}
	signs, err := keys.Open(ctx, store, valid, time.Now, log)
	if err != nil {
		return err
	}
	provider, err := server.NewServer(ctx, server.Config{
		Issuer:             given.Issuer,
		Storage:            store,
		Signer:             signs,
		IDTokensValidFor:   valid,
		PasswordConnector:  connectors.LocalConnector,
		SkipApprovalScreen: true,
		AllowedOrigins:     given.Origins,
		Logger:             log,
	})
	if err != nil {
		return err
	}
	if given.Cert != "" {
		return http.ListenAndServeTLS(given.Listen, given.Cert, given.Key, provider)
	}
	return http.ListenAndServe(given.Listen, provider)
}
